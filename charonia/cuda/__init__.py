"""NVIDIA's driver and memory in its keeping: the gateway for memory of clients, executors for models; and DLPack.

    cuda_library      the driver's library, and contexts       cuda_stream   memory, streams, events and graphs of a GPU
    pinned_memory     the host's, within a bound               dlpack_capsules   arrays of other libraries, and for them
    lost_contexts     errors after which a process has lost a GPU   visible_devices   one GPU for a process

May import `datatypes` and `errors`. Begin reading at `cuda_library`.
"""
