"""Tests of the server, run against a replica on each of two nodes."""

from __future__ import annotations

import pytest

from tests.server.test_chat import *  # noqa: F403
from tests.server.test_completions import *  # noqa: F403
from tests.server.test_response_format import *  # noqa: F403

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
