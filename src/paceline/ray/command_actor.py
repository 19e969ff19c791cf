"""Actor that ends with the command that placed engines; a killed command leaves none."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

import ray
from paceline.ray.line import NAMESPACE
from ray import serve

AGAIN_S = 5.0  # before an actor that could not be reached is looked for again
log = logging.getLogger(__name__)


class CommandActor:
    """Ends with the process of the command that made it: Ray ends it then."""

    async def end(self) -> None:
        """Wait for the end of this actor, which callers get as an error."""
        await asyncio.Event().wait()


def make_command_actor(application: str) -> Any:
    """Return an application's actor, which lives while this process and the handle do."""
    return ray.remote(CommandActor).options(name=application, namespace=NAMESPACE, num_cpus=0).remote()


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
    except ActorUnavailableError:  # it may well live
        return False
    except (ValueError, RayActorError):  # there is none, or it has ended
        return True
    except Exception as error:  # Ray's head may be away for a while
        log.warning("the command that placed %s cannot be reached: %s", application, error)
    return False
