"""A writer of streams whose frames come from elsewhere: it only fills silences."""

from __future__ import annotations

from triforce.server.doors.chat import ChatWriter


class IdleWriter(ChatWriter):
    """Writes `idle` where nothing else comes."""

    def __init__(self) -> None:
        pass

    def idle_frame(self) -> bytes:
        return b"idle"
