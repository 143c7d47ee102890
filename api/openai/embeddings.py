"""POST /v1/embeddings: a model's final hidden states of a text, pooled and normalised.

Source: OpenAI API reference, "Embeddings"; shortened ones: Kusupati et al. 2022 (Matryoshka), for models trained so.
"""
from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any, NoReturn

import orjson
from starlette.requests import Request

from actors.messages import TextDelta
from actors.sampling_params import ParameterError, SamplingParams
from api.dialect import REQUEST_ID
from api.errors import ApiError, bad_parameter
from api.exchange import Asker, Generation, Reply, parse_body
from api.guard import tenant_of
from api.openai.embedding_schemas import EmbeddingRequest
from api.openai.lower import check_lengths, check_num_generations
from api.routes import Endpoint
from api.schemas import bad_field
from api.service import service_of
from api.surface import EngineInfo
from api.timings import Times


async def embeddings(request: Request) -> Reply:
    """Embeds texts."""
    service = service_of(request)
    engine = service.ready_engine()
    body = await parse_body(request, EmbeddingRequest)
    service.check_model(body.model)
    if body.dimensions is not None and body.dimensions > engine.info.hidden_size:
        raise bad_field("dimensions", f"this model has {engine.info.hidden_size}, got {body.dimensions}")
    if body.truncate_prompt_tokens is None:
        check_lengths(engine, body.input)
    check_num_generations(engine, len(body.input), 1, "input")
    try:
        sampling = SamplingParams(max_tokens=0, pooling=body.pooling or "last",
                                  truncate_prompt_tokens=body.truncate_prompt_tokens)
    except ParameterError as error:
        raise bad_parameter(error) from None
    asker = Asker(body.priority or 0, body.user or "", body.cache_salt or "", tenant_of(request))
    generations = [Generation(text.field, text.value, sampling, asker=asker) for text in body.input]
    return Reply(service, engine, generations, EmbeddingWriter(body, engine.info, str(request.scope[REQUEST_ID])),
                 stream=False)


class EmbeddingWriter:
    """One document."""
    keep_alive = b""
    metrics: Times | None = None

    def __init__(self, request: EmbeddingRequest, info: EngineInfo, request_id: str) -> None:
        self.answer_id = request_id             # the document has none of its own
        self.wants_metrics = bool(request.return_metrics)
        self._model = info.model
        self._dimensions = request.dimensions
        self._as_base64 = request.encoding_format == "base64"

    def document(self, completions: Sequence[TextDelta]) -> bytes:
        num_tokens = sum(completion.usage.num_prompt_tokens for completion in completions if completion.usage)
        answer: dict[str, Any] = {
            "object": "list", "model": self._model,
            "data": [{"object": "embedding", "index": index, "embedding": self._embedding(completion.pooled)}
                     for index, completion in enumerate(completions)],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}
        if self.wants_metrics or self.metrics is not None:
            answer["metrics"] = self.metrics
        return orjson.dumps(answer)

    def _embedding(self, state: Sequence[float]) -> list[float] | str:
        """The first dimensions, of length 1; as base64 their float32 numbers, lowest byte first."""
        values = state[:self._dimensions]
        length = math.sqrt(math.fsum(value * value for value in values))
        unit = [value / length for value in values] if length else list(values)
        return base64.b64encode(struct.pack(f"<{len(unit)}f", *unit)).decode() if self._as_base64 else unit

    def events(self, index: int, delta: TextDelta) -> NoReturn:
        raise AssertionError("embeddings are not streamed")

    def last_events(self) -> NoReturn:
        raise AssertionError("embeddings are not streamed")

    def error_event(self, error: ApiError) -> NoReturn:
        raise AssertionError("embeddings are not streamed")


routes = [Endpoint("POST", "/v1/embeddings", embeddings, EmbeddingRequest)]
