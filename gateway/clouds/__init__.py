"""The HTTP fronts of SageMaker and Vertex AI (H55): their paths and headers over the v2 interface.

May import `http` and below. Begin reading at `cloud_application`, the common part.
"""
