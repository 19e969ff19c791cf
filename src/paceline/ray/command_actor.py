"""Actors that stand for running commands in a cluster.

A command's engines end with its actor. By the actor, other commands see that the command runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray
from paceline.ray.line import NAMESPACE
from ray import serve

AGAIN_S = 5.0  # wait before an actor that could not be reached is looked for again
ENDING = "ends-serve"  # name of the actor of a command that is ending Ray Serve
ENDS_S, LOOK_S = 60.0, 0.2  # longest wait for a command that is ending Ray Serve; time between two looks
log = logging.getLogger(__name__)


class CommandActor:
    """Actor that Ray ends when the process of the command that made it ends."""

    async def end(self) -> None:
        """Wait for the end of this actor, which callers get as an error."""
        await asyncio.Event().wait()


def make_command_actor(application: str) -> Any:
    """Return an application's actor, which lives as long as this process and the handle.

    The actor is on this machine, so the loss of another does not end it. Raises `ValueError` if the name is taken.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": application, "namespace": NAMESPACE, "num_cpus": 0, "max_restarts": -1}
    return ray.remote(CommandActor).options(scheduling_strategy=here, **options).remote()


def wait_for_ending() -> None:
    """Wait while another command ends Ray Serve. Make this command's own actor first."""
    end_s = time.monotonic() + ENDS_S
    while ENDING in _commands():
        if time.monotonic() > end_s:
            log.warning("another command has been ending Ray Serve for %.0f s; it is not waited for", ENDS_S)
            return
        time.sleep(LOOK_S)


def end_serve(application: str) -> None:
    """End Ray Serve unless a command needs it.

    application: this command's, which it needs no more. A command that begins meanwhile is seen here, or it sees
    the actor made here and waits.
    """
    try:
        actor = make_command_actor(ENDING)
    except ValueError:  # another command is ending Ray Serve
        return
    if not serve.status().applications and _commands() <= {ENDING, application}:
        serve.shutdown()
    ray.kill(actor)


def _commands() -> set[str]:
    """Return the names of all commands' actors."""
    return {name for name in names_here() if ":" not in name}  # an engine's actor has a colon in its name


def names_here() -> set[str]:
    """Return the names of Paceline's actors that live."""
    return {one["name"] for one in list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE}


async def end_with_command(application: str) -> None:
    """Remove an application from Ray Serve once its command has ended."""
    while not await _has_ended(application):
        await asyncio.sleep(AGAIN_S)
    log.warning("the command that placed %s has ended: its engines end, too", application)
    await asyncio.to_thread(serve.delete, application, _blocking=False)


async def _has_ended(application: str) -> bool:
    """Wait for a command's end; return False if its actor could not be reached."""
    try:
        actor = await asyncio.to_thread(ray.get_actor, application, namespace=NAMESPACE)
        await actor.end.remote()
    except ActorUnavailableError:  # the actor may well live
        return False
    except (ValueError, RayActorError):  # there is no such actor, or it has ended
        return True
    except Exception as error:  # Ray's head may be away for a while
        log.warning("the command that placed %s cannot be reached: %s", application, error)
    return False
