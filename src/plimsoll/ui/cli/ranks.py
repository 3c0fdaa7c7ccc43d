"""For a command that torchrun started on several ranks: results are printed once, and all ranks end with one exit code.

The ranks join a process group after they have loaded the target (the model and batch), unless the target has made a group
itself. Only the first rank prints results and writes files. An error is printed by the first rank that raised it itself. At the
end, all ranks wait for each other, so that torchrun does not stop a rank before the error is printed. They do not wait for
ranks that are already missing.

A command for a single process raises an error on the first rank, before it loads anything. The other ranks exit silently.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import typer

from plimsoll.errors import InvalidOption, PlimsollError, RankError, RankMissing
from plimsoll.ui.cli import terminal

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from plimsoll.session.rendezvous.world import World
    from plimsoll.ui.cli.work import Loaded

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables that torchrun sets for each process."""
_LOADING_SECONDS = 600.0
"""How many seconds ranks wait for each other to load the target. They may build the same model at very different speeds."""
_PARTING_SECONDS = 30.0
_LOADED = "loaded"
"""The start of a key in torchrun's store.

The rest of the key is a rank. The key says that this rank has loaded its model and batch, or failed to.
"""


class _Farewell(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the message of one rank to the others at the end of a command. It says whether the rank had an error of its own."""

    has_own_error: bool


@dataclass(slots=True)
class Crew:
    """The ranks that run one command together, from the point of view of this rank. Without torchrun, this process is the only
    rank.
    """

    is_several: bool
    has_joined: bool = False
    _launched: World | None = None

    @property
    def speaks(self) -> bool:
        """Whether this rank prints results and writes files."""
        return not self.is_several or os.environ["RANK"] == "0"

    def device(self, name: str) -> str:
        """Return the name of this rank's device.

        Under torchrun, ``cuda`` becomes this process's own GPU, ``cuda:LOCAL_RANK``.
        """
        own = os.environ.get("LOCAL_RANK")
        return f"cuda:{own}" if self.is_several and name == "cuda" and own is not None else name

    def load(self, load: Callable[[], Loaded]) -> Loaded:
        """Load the target (a model with its batch) on all ranks and join the process group. If one rank fails, all ranks raise
        an error.

        Args:
            load: checks options and makes the target; it may also make the process group.
        """
        if not self.is_several:
            return load()
        from plimsoll.session.rendezvous.conversation import Conversation
        from plimsoll.session.rendezvous.world import current_world

        loaded: Loaded | None = None
        failure: PlimsollError | None = None
        try:
            loaded = load()
        except PlimsollError as error:
            failure = error
        try:
            self._join(None if loaded is None else loaded.target.model)
        except RankMissing as error:
            raise (failure or error) from error.__cause__
        world = current_world()
        assert world is not None
        with Conversation(world, "load", timeout_seconds=_LOADING_SECONDS) as conversation:
            if failure is not None:
                raise failure
            conversation.ask("loaded")
        assert loaded is not None
        return loaded

    def part(self, error: PlimsollError | None) -> bool:
        """Wait for the other ranks at the end of the command. ``error`` is this rank's error, or ``None``.

        Returns:
            Whether this rank has to print the error.
        """
        if not self.is_several:
            return True
        from plimsoll.session.rendezvous.exchange import exchange
        from plimsoll.session.rendezvous.world import current_world

        world = current_world() or self._launched
        if world is None:
            return True
        topic = "end"
        if isinstance(error, RankMissing):
            if world.rank in error.ranks:
                return False  # the ranks that waited for this one report it
            topic = f"end without {', '.join(map(str, error.ranks))}"
            world = replace(world, ranks=tuple(rank for rank in world.ranks if rank not in error.ranks))
        own = _Farewell(has_own_error=error is not None and not isinstance(error, RankError))
        try:
            told = exchange(world, topic, msgspec.json.encode(own), timeout_seconds=_PARTING_SECONDS)
        except RankError:
            return True
        failed = [
            rank
            for rank, farewell in zip(world.ranks, told, strict=True)
            if msgspec.json.decode(farewell, type=_Farewell).has_own_error
        ]
        return world.rank == (failed[0] if failed else world.ranks[0])

    def leave(self) -> None:
        """Destroy the process group if this object made it."""
        if self.has_joined:
            import torch.distributed as dist

            dist.destroy_process_group()
            self.has_joined = False

    def _join(self, model: torch.nn.Module | None) -> None:
        import torch.distributed as dist

        from plimsoll.session.rendezvous.world import launched_world

        if dist.is_initialized():
            return
        kinds = set() if model is None else {parameter.device.type for parameter in model.parameters()}
        try:
            self._launched = launched_world(_LOADING_SECONDS)
            if self._launched is not None:
                self._launched.store.set(f"{_LOADED}/{self._launched.rank}", "")
            dist.init_process_group(
                "nccl" if "cuda" in kinds else "gloo", timeout=datetime.timedelta(seconds=_LOADING_SECONDS)
            )
        except dist.DistStoreError as error:
            raise self._not_loaded() from error
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise InvalidOption(
                f"The process group cannot be made: {type(error).__name__}: {error}",
                why=f"the variables {', '.join(_VARIABLES)} are set, and WORLD_SIZE is {os.environ['WORLD_SIZE']}, so "
                "plimsoll connects that many ranks",
                next="start the command with torchrun, or unset these variables to use one process",
            ) from error
        self.has_joined = True

    def _not_loaded(self) -> RankMissing:
        """Return the error for ranks that did not load the target in time.

        The error names them if torchrun's store knows them.
        """
        count, missing = os.environ["WORLD_SIZE"], tuple[int, ...]()
        if self._launched is not None:
            ranks, store = self._launched.ranks, self._launched.store
            missing = tuple(rank for rank in ranks if not store.check([f"{_LOADED}/{rank}"]))
        named = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {count}"
        return RankMissing(
            f"{named if missing else f'Some of {count} ranks'} did not load the target within {_LOADING_SECONDS:g} s.",
            why="every rank waits until all ranks have built their models, and this rank has built its model",
            next="look at what the missing ranks are doing; if the target needs longer, let it call init_process_group itself, "
            "with a longer timeout",
            ranks=missing,
        )


@contextlib.contextmanager
def exit_codes(*, is_json: bool = False) -> Iterator[Crew]:
    """A context like ``terminal.exit_codes``, for a command that may run on several ranks.

    An error is printed by one rank, and all ranks wait for each other at the end. The context gives the ``Crew``.

    Args:
        is_json: write the error as JSON to stdout instead of text to stderr.

    Raises:
        typer.Exit: with the error's code, on every rank.
    """
    is_told = all(name in os.environ for name in _VARIABLES)
    crew = Crew(is_told and os.environ["WORLD_SIZE"] != "1")
    try:
        with terminal.exit_codes(is_json=is_json):
            try:
                with terminal.no_exits():
                    yield crew
            except PlimsollError as error:
                if crew.part(error):
                    raise
                raise typer.Exit(error.exit_code) from error
            except typer.Exit:
                crew.part(None)
                raise
            crew.part(None)
    finally:
        crew.leave()


@contextlib.contextmanager
def one_process(command: str, *, is_json: bool = False) -> Iterator[None]:
    """A context like ``terminal.exit_codes``, for a command of a single process.

    If torchrun started several processes, it raises an error.

    The ranks do not communicate for this check. Ranks other than the first exit at once without an error. So torchrun ends with
    the first rank's error, after that rank has printed it.

    Args:
        command: the command's name, as typed.
        is_json: write the error as JSON to stdout instead of text to stderr.

    Raises:
        typer.Exit: with the error's code; under torchrun, with 0 on ranks other than the first.
    """
    ranks = os.environ.get("WORLD_SIZE", "1") if terminal.is_under_torchrun() else "1"
    with terminal.exit_codes(is_json=is_json):
        if ranks != "1":
            if os.environ.get("RANK") != "0":
                raise typer.Exit
            raise InvalidOption(
                f"plimsoll {command} runs in one process, but torchrun started {ranks}.",
                why="every process would repeat all the work, print it again and write the same files; only plan, verify, "
                "compare and compress-gradients work on several ranks together",
                next=f"run plimsoll {command} without torchrun; inside a process that torchrun started, remove "
                f"{terminal.TORCHRUN} from the environment",
            )
        yield
