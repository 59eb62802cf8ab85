"""What generating text costs: the bare engine beside OpenVINO GenAI's own, and through a server.

__main__   the command line, and the turns
loops      both engines, one request list at a time
served     clients that read streams from a server
"""
