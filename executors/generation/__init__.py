"""Continuous batching: many requests that generate text share each step of one decoder.

    engine               the interfaces: an engine that admits requests and makes steps, and the decoder below it
    step_scheduler       pure: what the next step computes; with block_pool, adapter_slots, scheduled_request
    token_engine         our engine: the scheduler, a decoder, sampling; step_input and generation_state are its parts
    generating_instance  requests as tensors over any engine, which runs in engine_thread; text_requests, text_answer
                         and progress_codec are its parts

May import `charonia.generation` and below, and `charonia.backend`. Begin reading at `engine`.
"""
