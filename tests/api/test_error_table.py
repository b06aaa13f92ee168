"""The error table as such, without a server."""

from __future__ import annotations

import pytest

from mlx_server import errors
from mlx_server.api.errors import error_info
from tests.api.worlds import ALL_ERRORS


def test_every_error_of_the_tree_is_in_the_table():
    tree = {error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, Exception)}
    assert {type(error) for error, *_ in ALL_ERRORS} == tree - {errors.ServeError}


def test_a_fault_of_ours_tells_nothing():
    info = error_info(RuntimeError("secret"))
    assert info.status == 500
    assert "secret" not in info.message


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (errors.InvalidRequestError("m"), "invalid_request_error"),
        (errors.AuthenticationError("m"), "authentication_error"),
        (errors.PermissionDeniedError("m"), "permission_error"),
        (errors.ModelNotFoundError("m"), "not_found_error"),
        (errors.QuotaExceededError("m"), "rate_limit_error"),
        (errors.QueueFullError("m", "r"), "overloaded_error"),
        (errors.UnknownModelError("m"), "not_found_error"),
        (errors.ModelLoadError("m"), "api_error"),
        (errors.DownloadError("m"), "overloaded_error"),
    ],
)
def test_the_shape_of_anthropic(status: errors.ServeError, kind: str):
    info = error_info(status)
    assert info.body("/v1/messages") == {"type": "error", "error": {"type": kind, "message": info.message}}
    assert "code" in info.body("/v1/chat/completions")["error"]
