"""What the OpenAI API stores: responses, files and batches, all of them in the log (ADR 0046).

    response_requests, response_events   the JSON of `/v1/responses`, and its events: pure
    response_routes                      a response is a job: created, followed, cancelled, deleted
    multipart_forms                      bodies of uploads, read as they come: pure
    stored_objects, file_routes          files, in blobs that expire
    batch_lines                          a batch's input and output, line by line: pure
    batch_facts, batch_runs              how a batch stands, and the gateway that drives it
    batch_routes                         `/v1/batches`

May import the other modules of `gateway.openai`. Begin reading at `response_routes` and `batch_runs`.
"""
