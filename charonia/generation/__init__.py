"""Text generation: what gateways and executors have to agree on, token by token.

    text_tensors  the tensors of a model that generates text
    parameters    how tokens are sampled and when a text ends
    text_assets   a model's tokenizer, chat template and end tokens, as one blob
    tokenizer     text to token ids, and the exact bytes of each token
    detokenizer   text of tokens that come one by one, with stop strings
    sampling      the next token of each row of logits
    block_hashes  names of the blocks of a prompt
    prompt_keys   names of its beginnings, for placement
    grammar       structured output: which tokens may come next
    templates     the prompt of a chat
    tool_calls    calls of tools in the text of an answer

Pure, but for libraries that its modules import when they are first needed (the extra `charonia[llm]`), the thread in
which `grammar` compiles and the clock of `templates`. May import `errors` and `datatypes`. Begin reading at
`text_tensors`.
"""
