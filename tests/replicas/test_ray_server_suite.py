"""What the tests of the server ask of one engine, asked of a replica on each of two nodes."""

from __future__ import annotations

import pytest

from tests.server.test_chat import *  # noqa: F403
from tests.server.test_chat import test_a_stream_adds_up_to_the_whole as test_a_streamed_chat_adds_up_to_the_whole
from tests.server.test_completions import *  # noqa: F403
from tests.server.test_response_format import *  # noqa: F403

__all__ = ["test_a_streamed_chat_adds_up_to_the_whole"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
