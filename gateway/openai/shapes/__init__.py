"""The JSON of the OpenAI API: requests read into neutral values, answers, chunks and errors written. Pure.

May import `http.codec` and the kernel. Begin reading at `text_answers`.
"""
