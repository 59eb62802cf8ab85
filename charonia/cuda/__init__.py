"""NVIDIA's driver, for the parts that use GPUs: the gateway for memory of clients, executors for models.

May import nothing. Begin reading at `cuda_library`.
"""
