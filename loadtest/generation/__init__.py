"""What generating text costs: the bare engine beside OpenVINO GenAI's own, and through a server.

__main__   the command line, and the turns
loops      both engines, one request list at a time
served     clients that read streams from a server: `generate_stream`, `/v1/completions`, `ModelStreamInfer`
figures    medians and ratios of the rounds, as a table and as JSON
chart      times against load, as SVG
durable    tokens that the log takes, of an engine without a model, which is in token_source
"""
