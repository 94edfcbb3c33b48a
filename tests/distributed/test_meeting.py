"""Meetings of ranks: late ones are waited for, and strangers neither join nor keep the ranks from meeting."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.socket_ranks import free_port, run_ranks
from triforce.distributed import meeting, rank_key
from triforce.distributed.handshake import MAX_MESSAGE_BYTES, JoinRequest, join, receive, send
from triforce.distributed.socket_group import SocketGroup
from triforce.errors import RankError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def own_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(rank_key.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def meet_all(count: int, url: str) -> list[Any]:
    return run_ranks(count, url, lambda group: group.broadcast("met"))


def test_late_ranks_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order; nothing is left in the folder."""
    meet = meeting.meet
    for delays in ((0.3, 0, 0.1), (0, 0.3, 0.1), (0.1, 0.3, 0)):

        def late(rank: int, count: int, url: str, delays: tuple[float, ...] = delays) -> dict[int, socket.socket]:
            time.sleep(delays[rank])
            return meet(rank, count, url)

        monkeypatch.setattr("triforce.distributed.socket_group.meet", late)
        assert meet_all(3, (tmp_path / "meeting").as_uri()) == ["met"] * 3
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"]


def test_rank_taken_for_a_stranger_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It connected, and was then so slow that rank 0 did not wait for its proof."""
    attempts = []

    def slow_at_first(connection: socket.socket, key: bytes, request: JoinRequest) -> None:
        attempts.append(request.rank)
        if len(attempts) == 1:
            time.sleep(0.5)
        join(connection, key, request)

    monkeypatch.setattr(meeting, "JOIN_SECONDS", 0.1)
    monkeypatch.setattr(meeting, "join", slow_at_first)
    assert meet_all(2, (tmp_path / "meeting").as_uri()) == ["met"] * 2
    assert len(attempts) > 1


def test_sockets_of_killed_ranks_are_replaced(tmp_path: Path) -> None:
    """An earlier run was killed while its ranks met; another program has left a file."""
    url = (tmp_path / "meeting").as_uri()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "meeting"))
        stale.listen()
    assert (tmp_path / "meeting").is_socket()
    assert meet_all(3, url) == ["met"] * 3
    (tmp_path / "meeting").write_text("no socket")
    assert meet_all(2, url) == ["met"] * 2


def test_long_path_of_folder_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir(mode=0o700)
    assert meet_all(3, (folder / "a name with spaces").as_uri()) == ["met"] * 3


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    for error in meet_all(2, (folder / "meeting").as_uri()):
        assert isinstance(error, RankError) and "give a folder of mode 700" in str(error)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("env://", "give file://FOLDER/NAME or tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "give file://FOLDER/NAME or tcp://HOST:PORT"),
        ("tcp://127.0.0.1:70000", "give file://FOLDER/NAME or tcp://HOST:PORT"),
        ("file:///no/such/folder/meeting", "cannot be used (No such file or directory)"),
        ("tcp://192.0.2.1:7", "cannot listen at"),
    ],
)
def test_impossible_meeting_raises(url: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(RankError) as raised:
        SocketGroup(0, 2, url)
    assert told in str(raised.value)


def test_ranks_of_other_counts_and_numbers_are_refused(tmp_path: Path) -> None:
    """Rank 0 goes on waiting for the right ones."""
    url = (tmp_path / "meeting").as_uri()
    results: list[Any] = []
    first_thread = threading.Thread(target=lambda: results.extend(meet_some([0], 3, url)), daemon=True)
    first_thread.start()
    (error,) = meet_some([1], 2, url)
    assert str(error) == "rank 1 is one of 2 ranks, and rank 0 one of 3"
    second = threading.Thread(target=lambda: results.extend(meet_some([1], 3, url)), daemon=True)
    second.start()
    time.sleep(0.3)
    (error,) = meet_some([1], 3, url)
    assert str(error) == "there are two processes of rank 1"
    (error,) = meet_some([0], 3, url)
    assert isinstance(error, RankError) and "rank 0 cannot listen at" in str(error) and "in use" in str(error)
    results += meet_some([2], 3, url)
    first_thread.join()
    second.join()
    assert results == ["met"] * 3


def meet_some(ranks: list[int], count: int, url: str) -> list[Any]:
    return run_ranks(count, url, lambda group: group.broadcast("met"), ranks=ranks)


class Stranger:
    """A process that connects to rank 0 and does not know the key."""

    def __init__(self, port: int, act: Callable[[socket.socket], None]) -> None:
        self.port = port
        self.act = act
        self.refused: bytes | None = None

    def run(self) -> None:
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", self.port))
                break
            except OSError:
                time.sleep(0.01)
        with connection:
            self.act(connection)
            connection.settimeout(30)
            try:
                self.refused = connection.recv(1 << 16)
            except OSError:
                self.refused = b""


def silent(connection: socket.socket) -> None:
    pass


def garbage(connection: socket.socket) -> None:
    connection.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" + bytes(range(256)))


def endless(connection: socket.socket) -> None:
    connection.sendall(struct.pack("<I", MAX_MESSAGE_BYTES + 1))


def keyless(connection: socket.socket) -> None:
    with pytest.raises(RankError, match="the key of the ranks is another one"):
        join(connection, b"another key", JoinRequest(1, 2, 0))


def echoing(connection: socket.socket) -> None:
    """Send back what comes: a proof of one side is none of the other."""
    nonce = bytes(32)
    send(connection, nonce)
    receive(connection)
    send(connection, bytes(32) + b"[1, 2, 0]")
    assert receive(connection) == bytes(32)


@pytest.mark.parametrize("act", [silent, garbage, endless, keyless, echoing])
def test_stranger_does_not_join(act: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the first_thread to connect. The ranks meet all the same."""
    monkeypatch.setattr(meeting, "JOIN_SECONDS", 0.3)
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    stranger = Stranger(port, act)
    results: list[Any] = []
    first_thread = threading.Thread(target=lambda: results.extend(meet_some([0], 2, url)), daemon=True)
    first_thread.start()
    stranger.run()
    assert len(stranger.refused or b"") <= 36, "it learns a nonce at most"
    results += meet_some([1], 2, url)
    first_thread.join()
    assert results == ["met"] * 2


def test_rank_with_another_key_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    results: list[Any] = []
    keys = iter([b"one", b"another", b"one"])
    monkeypatch.setattr(meeting, "rank_key", lambda: next(keys))
    first_thread = threading.Thread(target=lambda: results.extend(meet_some([0], 2, url)), daemon=True)
    first_thread.start()
    time.sleep(0.2)
    (error,) = meet_some([1], 2, url)
    assert isinstance(error, RankError) and "the key of the ranks is another one there" in str(error)
    results += meet_some([1], 2, url)
    first_thread.join()
    assert results == ["met"] * 2


def test_connection_with_itself_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may choose the port to which a rank connects for its own end, too, while no rank listens there."""
    port = free_port()
    connect = socket.create_connection
    selves: list[socket.socket] = []

    def connect_to_itself_first(address: tuple[str, int]) -> socket.socket:
        if selves:
            return connect(address)
        selves.append(socket.socket())
        selves[0].bind(address)
        selves[0].connect(address)
        return selves[0]

    monkeypatch.setattr(socket, "create_connection", connect_to_itself_first)
    results: list[Any] = []
    second = threading.Thread(target=lambda: results.extend(meet_some([1], 2, f"tcp://127.0.0.1:{port}")), daemon=True)
    second.start()
    while not selves or selves[0].fileno() != -1:
        time.sleep(0.01)
    assert meet_some([0], 2, f"tcp://127.0.0.1:{port}") == ["met"]
    second.join()
    assert results == ["met"]


def test_ports_are_closed_once_ranks_have_met() -> None:
    port = free_port()

    def run(group: SocketGroup) -> bool:
        group.barrier()
        with socket.socket() as stranger:
            refused = stranger.connect_ex(("127.0.0.1", port)) != 0
        group.barrier()
        return refused

    assert run_ranks(2, f"tcp://127.0.0.1:{port}", run) == [True, True]


def test_key_is_made_once_and_private(tmp_path: Path) -> None:
    keys: list[bytes] = []
    threads = [threading.Thread(target=lambda: keys.append(rank_key.rank_key())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (file,) = (tmp_path / "cache" / "triforce").iterdir()
    assert len(keys) == 8 and set(keys) == {file.read_bytes()} and len(keys[0]) == rank_key.KEY_BYTES
    assert file.stat().st_mode & 0o777 == 0o600


def test_key_of_environment_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank_key.VARIABLE, "a secret")
    assert rank_key.rank_key() == b"a secret" and not (tmp_path / "cache").exists()


def test_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    rank_key.rank_key()
    file = tmp_path / "cache" / "triforce" / "rank-key"
    file.chmod(0o640)
    with pytest.raises(RankError, match="others can read it"):
        rank_key.rank_key()
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"chosen by another")
    with pytest.raises(RankError, match="TRIFORCE_RANK_KEY"):
        rank_key.rank_key()
