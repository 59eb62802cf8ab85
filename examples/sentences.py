"""Ask a running server how near sentences are to one another in meaning, with tritonclient.

``python examples/sentences.py [--protocol grpc] [--url localhost:8001] [SENTENCE ...]``

The model is ``sentence_embeddings`` of ``examples/models_torch``. Each line is a pair of sentences and the cosine of
their vectors, the nearest pair first: 1 is the same, about 0 is unrelated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from client import PORTS, Server
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

SENTENCES = ("A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby.")
COSINES = (0.7553, -0.105, -0.061)
"""Of the first and the second, the first and the third, the second and the third."""


def texts(sentences: Sequence[str]) -> NDArray[np.object_]:
    """BYTES [n, 1]: what the model takes."""
    return np.array([sentence.encode() for sentence in sentences], np.object_)[:, np.newaxis]


def cosines(vectors: NDArray[np.float32]) -> dict[tuple[int, int], float]:
    """The cosine of each pair of rows, which have length 1, by the rows' numbers."""
    return {pair: float(vectors[pair[0]] @ vectors[pair[1]]) for pair in combinations(range(len(vectors)), 2)}


def main(arguments: list[str] | None = None) -> int:
    """Print the pairs; a refusal or an unreachable server is one line on stderr and exit status 1."""
    parser = argparse.ArgumentParser(description="Ask a running server how near sentences are in meaning.")
    parser.add_argument("--protocol", choices=sorted(PORTS), default="http")
    parser.add_argument("--url", help="HOST:PORT of the server (default: localhost and the protocol's usual port)")
    parser.add_argument("sentence", nargs="*", default=SENTENCES, help="two or more sentences (default: three)")
    options = parser.parse_args(arguments)
    server = Server(options.protocol, options.url or f"localhost:{PORTS[options.protocol]}")
    try:
        vectors = server.infer("sentence_embeddings", {"TEXT": texts(options.sentence)})["EMBEDDING"]
    except (InferenceServerException, OSError) as error:
        print(f"sentences: {error}", file=sys.stderr)
        return 1
    finally:
        server.close()
    for (left, right), cosine in sorted(cosines(vectors).items(), key=lambda item: -item[1]):
        print(f"{cosine:7.4f}  {options.sentence[left]}  |  {options.sentence[right]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
