"""HTTP/2 and gRPC as bytes: frames, headers, messages, limits.

Pure; may import `gateway.grpc.statuses`. Begin reading at `http2_frames`.
"""
