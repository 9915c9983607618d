"""ApiError: a refused or failed request, and its status and form in each interface."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.responses import JSONResponse

from kvchat.chat.fields import FieldFault
from kvchat.core.errors import ContextTooLong, KvchatError, ModelError, UsageError


@dataclass(frozen=True, slots=True)
class ApiError(Exception):
    """One sentence for the client, with the HTTP status.

    param     the field at fault, None if no single one is
    code      a word that programs may test, None for none
    too_long  the prompt that does not fit: clients know such an error by its interface's words
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    too_long: ContextTooLong | None = None

    @property
    def openai_type(self) -> str:
        return {401: "authentication_error", 403: "permission_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )

    @property
    def anthropic_type(self) -> str:
        named = {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            413: "request_too_large",
            503: "overloaded_error",
        }
        return named.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")


ErrorForm = Callable[[ApiError], dict[str, object]]


def openai_form(error: ApiError) -> dict[str, object]:
    """Return OpenAI's error object."""
    return {
        "error": {
            "message": _openai_words(error),
            "type": error.openai_type,
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_form(error: ApiError) -> dict[str, object]:
    """Return Anthropic's error object."""
    return {
        "type": "error",
        "error": {
            "type": error.anthropic_type,
            "message": _anthropic_words(error),
            **({"details": {"error_code": error.code}} if error.code else {}),
        },
    }


def ollama_form(error: ApiError) -> dict[str, object]:
    """Return ollama's error object, which is a sentence alone."""
    return {"error": _openai_words(error)}


def _openai_words(error: ApiError) -> str:
    """Return the sentence; LiteLLM and LangChain look for these words about a long prompt."""
    if error.too_long is None:
        return error.message
    limit = error.too_long.limit
    most = f": this model's maximum context length is {limit} tokens" if limit else ""
    about = f"The prompt is too long{most}. Please reduce the length of the messages."
    return f"{error.message} {about}"


def _anthropic_words(error: ApiError) -> str:
    """Return the sentence; Claude Code compacts a conversation that is refused with these words."""
    if error.too_long is None:
        return error.message
    num_tokens, limit = error.too_long.num_tokens, error.too_long.limit
    if num_tokens is None or limit is None:
        return f"prompt is too long: {error.message}"
    return f"prompt is too long: {max(num_tokens, limit + 1)} tokens > {limit} maximum"


def form_for(path: str) -> ErrorForm:
    """Return the error form of the interface that a path belongs to."""
    if path.startswith("/api/"):
        return ollama_form
    return anthropic_form if path.startswith("/v1/messages") else openai_form


def response_to(error: ApiError, path: str) -> JSONResponse:
    """Return the response that reports an error of a request for `path`."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(form_for(path)(error), error.status, headers)


def failed_server() -> ApiError:
    """Return the error for a fault of the server itself."""
    return ApiError(500, "The server failed; its log says why.")


def ended_server() -> ApiError:
    """Return the error for an answer that was not complete when the server had to end."""
    return ApiError(503, "The server was stopped before the answer was complete.", code="stopped")


def as_api_error(error: KvchatError | ApiError) -> ApiError:
    """Return the API's error for one of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, FieldFault):
        return ApiError(400, str(error), error.param, error.code)
    if isinstance(error, ContextTooLong):
        return ApiError(400, str(error), "messages", "context_length_exceeded", error)
    if isinstance(error, UsageError):
        return ApiError(400, str(error))
    if isinstance(error, ModelError):
        return ApiError(503, str(error), code="model_not_loaded")
    return ApiError(500, str(error))
