"""Text generation: what gateways and executors have to agree on, token by token.

    text_tensors  the tensors of a model that generates text
    parameters    how tokens are sampled and when a text ends

Pure, but for libraries that its modules import when they are first needed. May import `errors` and `datatypes`. Begin
reading at `text_tensors`.
"""
