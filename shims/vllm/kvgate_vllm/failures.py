"""Ending one request with an error and a message, while all others go on: vLLM has no interface for that.

The connector marks the request and keeps answering "ask later"; after each step the scheduler is made to finish what is marked. The
message travels in the last output's ``kv_transfer_params`` (``kvgate.error``); in an API server it becomes the HTTP error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from types import ModuleType
from typing import Any, Final

from kvgate_vllm.state import LOGGER, active_state
from kvgate_vllm.variants import BEAM_SEARCH, is_variant, message
from kvgate_vllm.wrapping import wrap

FRONT_END: Final = "vllm.v1.engine.async_llm"
REQUEST_MODELS: Final = ("vllm.entrypoints.openai.completion.protocol", "vllm.entrypoints.openai.chat_completion.protocol")


def install_scheduler_hook() -> None:
    """Wrap the scheduler. Raises ``RuntimeError`` if this vLLM has none of the known form."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(Scheduler, "update_from_output") or not hasattr(Scheduler, "finish_requests"):
        raise RuntimeError("this vLLM's scheduler is not one that kvgate knows (it supports 0.26 to 0.33)")
    wrap(Scheduler, "update_from_output", _update_from_output)


def _update_from_output(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = stock(self, *args, **kwargs)
    state = active_state(self.vllm_config)
    # Now, before the next step is planned: vLLM would compute what a failed load left open.
    failed = {} if state is None else state.failed_requests()
    if failed:
        _finish(self, failed, outputs)
    return outputs


def _finish(scheduler: Any, failed: dict[str, dict[str, Any]], outputs: dict[int, Any]) -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    requests = [scheduler.requests[name] for name in failed if name in scheduler.requests]
    requests = [request for request in requests if not request.is_finished()]
    names = {request.request_id for request in requests}
    scheduler.finish_requests(names, RequestStatus.FINISHED_ERROR)
    for of_client in outputs.values():
        # What this step sampled for one that fails was computed from something that it must not be computed from.
        of_client.outputs = [one for one in of_client.outputs if one.request_id not in names]
    for request in requests:
        told = failed[request.request_id]
        LOGGER.info("%s", told["kvgate"]["error"])
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            kv_transfer_params=told,
            trace_headers=request.trace_headers,
        )
        if request.client_index not in outputs:
            outputs[request.client_index] = EngineCoreOutputs(outputs=[])
        outputs[request.client_index].outputs.append(output)


def install_front_end_hook(module: ModuleType) -> None:
    """Wrap ``AsyncLLM`` of a front end that has just imported it."""
    wrap(module.AsyncLLM, "generate", _generate)


def install_request_hook(module: ModuleType) -> None:
    """Wrap the request models of an API server, as far as they know of beam search, which drops kv_transfer_params."""
    for model in vars(module).values():
        if isinstance(model, type) and "to_beam_search_params" in vars(model):
            wrap(model, "to_beam_search_params", _to_beam_search_params)


def _to_beam_search_params(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if is_variant(self):
        raise http_error(message(BEAM_SEARCH))
    return stock(self, *args, **kwargs)


async def _generate(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    stream = stock(self, *args, **kwargs)
    try:
        async for output in stream:
            error = error_of(output)
            if error is not None:
                raise http_error(error)
            yield output
    finally:
        await stream.aclose()


def error_of(output: Any) -> str | None:
    """The message of a request that kvgate ended, or None."""
    told = (getattr(output, "kv_transfer_params", None) or {}).get("kvgate")
    error = told.get("error") if isinstance(told, dict) else None
    return error if isinstance(error, str) else None


def http_error(text: str) -> Exception:
    """What this vLLM's API server answers with 409, or the nearest to it: 422 in 0.26, 400 where there is neither."""
    from vllm import exceptions

    if hasattr(exceptions, "GracefulHTTPError"):
        error: Exception = exceptions.GracefulHTTPError(text, http_status=HTTPStatus.CONFLICT)
    elif hasattr(exceptions, "VLLMUnprocessableEntityError"):
        error = exceptions.VLLMUnprocessableEntityError(text)
    else:
        error = ValueError(text)
    return error
