"""Options of a local fleet, and the cores of its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.control.routing import ROUTES, policy_named
from paceline.control.tails import OFF, parse_tail
from paceline.core.errors import ConfigError, suggest
from paceline.core.flags import add_flags, of_flags
from paceline.core.system import core_groups, deal, places, usable_cores

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

MAX_REPLICAS = 256
RESUMES = ("on", "off", "any")
HEDGES = ("off", "p95")
WRITE_TWICE = ("--hedge", "--audit")  # flags by which two replicas write one answer
PLACES = ("here", "ray")  # values of --on
AUTO = "auto"
EXACT_LAW = "coupled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Options of a fleet. Checked when made; raises `ConfigError`."""

    replicas: int = 1
    cores: str = AUTO  # or the cores of each replica, such as 0-3,4-7
    route: str = "seconds"
    resume: str = "on"  # off: an answer ends with its replica; any: it goes on under any promise key
    resume_wait_s: float = 30.0  # longest wait of an answer for a replica that can go on with it
    hedge: str = "off"
    tail: str = OFF  # what is done with the last answers of a roll-out, see `control/tails.py`
    audit: float = 0.0  # share of the finished answers that another replica writes again

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ConfigError(f"--replicas must be between 1 and {MAX_REPLICAS}, not {self.replicas}")
        if not 0 <= self.resume_wait_s <= 86400:
            raise ConfigError(f"--resume-wait must be between 0 and 86400 seconds, not {self.resume_wait_s}")
        if not 0 <= self.audit <= 1:
            raise ConfigError(f"--audit is a share of the answers from 0 to 1, not {self.audit}")
        for flag, value, known in (("--resume", self.resume, RESUMES), ("--hedge", self.hedge, HEDGES)):
            if value not in known:
                raise ConfigError(f"{flag} {value}: it is one of {', '.join(known)}{suggest(value, known)}")
        policy_named(self.route)
        parse_tail(self.tail)
        if self.cores != AUTO and len(core_groups(self.cores)) != self.replicas:
            raise ConfigError(f"--cores {self.cores} must name as many groups as --replicas {self.replicas}")

    def check_law(self, law: str) -> None:
        """Raise `ConfigError` for options that need the same seed to give the same text."""
        if law != EXACT_LAW and (flag := self._writes_twice):
            raise ConfigError(f"{flag} needs --law {EXACT_LAW}: by {law} two replicas write different texts")

    def check_renewal(self) -> None:
        """Raise `ConfigError` for options that need unchanging weights, as --rl may change them."""
        if flag := self._writes_twice:
            raise ConfigError(f"{flag} goes without --rl: by other weights two replicas write different texts")

    @property
    def of_several(self) -> list[str]:
        """The flags given that do nothing with one replica."""
        given = {"--hedge": self.hedge != HEDGES[0], "--audit": self.audit > 0, "--tail": self.tail != OFF}
        return [flag for flag, used in given.items() if used]

    @property
    def _writes_twice(self) -> str | None:
        """The first flag given by which two replicas write one answer."""
        return next((flag for flag in self.of_several if flag in WRITE_TWICE), None)

    @property
    def crowded(self) -> bool:
        """True if replicas share all cores, as there are more of them."""
        return self.cores == AUTO and self.replicas > len(usable_cores())

    def dealt(self) -> list[frozenset[int]]:
        """Return the cores of each replica. Raises `ConfigError` for cores it cannot have.

        More replicas than cores share all: two on one core would both wait for it while another core is idle.
        """
        usable = usable_cores()
        if self.crowded:
            return [usable] * self.replicas
        if self.cores == AUTO:
            return deal(self.replicas, usable, places(usable))
        groups = core_groups(self.cores)
        if missing := frozenset().union(*groups) - usable:
            raise ConfigError(f"--cores {self.cores}: this process may not use {sorted(missing)}")
        return groups


# The command line ------------------------------------------------------------------------------------

_FLAGS = {
    "replicas": "N engines that share the requests",
    "cores": "auto|GROUPS of each replica, such as 0-3,4-7; auto deals out all, those of a NUMA node together",
    "route": f"{'|'.join(ROUTES)} the replica of a request: by predicted seconds, longest kept prefix, fewest "
    "requests, or in turn",
    "resume": f"{'|'.join(RESUMES)} whether an answer goes on, bit for bit, when its replica ends; any: also "
    "under another promise key",
    "hedge": f"{'|'.join(HEDGES)} let a second replica write an answer whose first token is later than 95 %% of "
    "predictions allow",
    "tail": "off|spread|pack:ROWS when no more requests come: even the last rows out, or pack up to so many on "
    "each of few",
    "audit": "SHARE let another, idle replica write this share of the answers again, and compare",
}


def add_fleet_arguments(parser: ArgumentParser) -> None:
    """Add the flags."""
    group, defaults = parser.add_argument_group("fleet"), ReplicaOptions()
    add_flags(group, defaults, _FLAGS)
    group.add_argument(
        "--on",
        choices=PLACES,
        default=PLACES[0],
        help="where engines run: as processes here, or as a Ray Serve application",
    )
    group.add_argument(
        "--resume-wait",
        type=float,
        metavar="S",
        default=defaults.resume_wait_s,
        help="how long an answer waits for a replica that can go on with it",
    )


def fleet_options(args: Namespace) -> ReplicaOptions:
    """Return what parsed flags ask for. Raises `ConfigError`."""
    return of_flags(ReplicaOptions, args, resume_wait_s=args.resume_wait)
