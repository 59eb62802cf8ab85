"""The OpenAPI document of every HTTP endpoint, and the page that shows it.

Pure; may import `gateway.requests` and the words of `http.codec`. Begin reading at `operations`, one entry for each
method of each path; `schemas` are the bodies, `document` joins both, `page` is `/docs`.
"""
