"""Puts a batch's arrays where an instance wants them (`PlacedModel`), and brings its outputs back to the host.

    exchanging_instance   decides, and stands for the instance    device_link       one GPU: stream and memory
    device_arrays         inputs on a GPU, as DLPack              recycled_blocks   memory that is used again

Used by executors, by processes of isolated models and by the contract's suite; models that take arrays in the host's
memory do not use it. May import `cuda` and `backend`. Begin reading at `exchanging_instance`.
"""
