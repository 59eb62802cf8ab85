"""The OpenAI API (W4): its paths under `/v1`, over models that generate text or embed it (ADR 0045).

May import `http` and below. Begin reading at `openai_application`, which has the table of the paths; `shapes` has the
JSON of requests and answers.
"""
