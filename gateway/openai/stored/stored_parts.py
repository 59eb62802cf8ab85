"""Joins what the OpenAI API stores, for one gateway, and adds its paths."""

from __future__ import annotations

from gateway.handler import Handler
from gateway.openai.api_calls import RouteTable
from gateway.openai.embedding_routes import EmbeddingEndpoint
from gateway.openai.text_routes import TextEndpoints
from gateway.openai.text_serving import TextServing

from .batch_routes import add_batches
from .batch_runs import BatchRuns
from .file_routes import add_files
from .line_calls import ModelLines
from .response_routes import StoredResponses, add_responses
from .stored_objects import ObjectLog, StoredBatches, StoredFiles


class StoredParts:
    """Responses, files and batches of one gateway. `incarnation`: the gateway's, under which it drives batches."""

    def __init__(
        self,
        handler: Handler,
        log: ObjectLog,
        texts: TextEndpoints,
        serving: TextServing,
        embeddings: EmbeddingEndpoint,
        incarnation: str,
    ) -> None:
        self._serving = serving
        self._files = StoredFiles(log)
        self._batches = StoredBatches(log)
        self._responses = StoredResponses(handler, log, serving)
        lines = ModelLines(handler, texts, embeddings, self._responses)
        self._runs = BatchRuns(self._batches, self._files, lines, handler, incarnation)

    def add(self, routes: RouteTable) -> None:
        """Add the paths."""
        add_responses(routes, self._responses, self._serving)
        add_files(routes, self._files, self._batches)
        add_batches(routes, self._batches, self._files, self._runs)

    def start(self) -> None:
        """Begin to drive batches."""
        self._runs.start()

    async def close(self) -> None:
        """Give the batches back to other gateways."""
        await self._runs.close()
        await self._responses.endings.settled()
