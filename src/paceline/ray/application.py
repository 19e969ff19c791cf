"""The Ray Serve application: a deployment of engines, and a deployment of fronts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from paceline.core.errors import ConfigError, suggest
from paceline.ray.engine_host import EngineHost
from paceline.ray.front import FLEET, FrontServer, keys_of
from paceline.ray.line import NAMESPACE
from paceline.serve.asking import config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

# Arguments of `serve run` and of `args` in a Serve YAML, beside the options of `AsyncLLM`.
PLACEMENT = ("replicas", "fronts", "cpus", "autoscaling", "tpot_ms")
FRONT = ("api_key", "api_key_file", "insecure", "rl", "served_model_name", *FLEET)
HEALTH_S = 1.0  # between two looks at a replica
MAX_CALLS = 4096  # of fronts that are answered at once
POLICY = "paceline.ray:Headroom"


class EngineReplica:
    """Deployment `Engine`: owns the actor in which its engine is. Ray restarts and scales it."""

    async def __init__(self, model: str, options: Mapping[str, Any], cpus: float) -> None:  # type: ignore[misc]
        """Load the model. Raises `ConfigError`, `ModelError`, `EngineDied`."""
        context = serve.get_replica_context()
        self._name = f"{context.app_name}:{context.replica_id.unique_id}"
        actor = ray.remote(EngineHost).options(
            name=self._name, namespace=NAMESPACE, num_cpus=cpus, max_concurrency=MAX_CALLS
        )
        self._host: Any = actor.remote(model, dict(options))
        await self._host.start.remote()

    async def check_health(self) -> None:
        """Raise if actor or engine is dead; then Ray replaces this replica."""
        await self._host.health.remote()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `Headroom` reads."""
        return dict(await self._host.load.remote())

    async def __call__(self) -> str:
        """Return the name of the engine's actor."""
        return self._name


class FrontReplica:
    """Deployment `Front`: the HTTP side. Ray's proxy passes bytes on to it."""

    async def __init__(self, options: Mapping[str, Any], engines: Any) -> None:  # type: ignore[misc]
        """engines: handle of the deployment `Engine`, by which Ray knows that they belong together."""
        self._engines = engines
        await _FRONT.open(serve.get_replica_context().app_name, options)


_FRONT = FrontServer()  # of this process


class _Door:
    """ASGI callable that Ray can send to another process."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await _FRONT(scope, receive, send)


def app(args: Mapping[str, Any]) -> Any:
    """Return the application for `serve run paceline.ray:app` or a Serve YAML. Raises `ConfigError`.

    args: `model`, options of `AsyncLLM`, and those of `PLACEMENT` and `FRONT`; values may be texts.
    """
    given = {name: _value(value) for name, value in args.items()}
    placement = {name: given.pop(name) for name in PLACEMENT if name in given}
    front = {name: given.pop(name) for name in FRONT if name in given}
    model, cpus = str(given.pop("model", "default")), float(placement.get("cpus", 1))
    given.setdefault("threads", max(1, int(cpus)))
    try:
        config_of(model, given)
    except ConfigError as error:
        known = (*PLACEMENT, *FRONT, "model")
        unknown = next((name for name in given if f"unknown option {name!r}" in str(error)), None)
        raise ConfigError(
            f"unknown argument {unknown!r}{suggest(unknown, known)}" if unknown else str(error)
        ) from None
    keys_of(front)
    engine = serve.deployment(
        name="Engine",
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=HEALTH_S,
        max_ongoing_requests=MAX_CALLS,
        **_replicas(placement),
    )(EngineReplica)
    served = serve.deployment(
        name="Front",
        num_replicas=int(placement.get("fronts", 1)),
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_CALLS,
    )(serve.ingress(_Door())(FrontReplica))
    return served.bind(front, engine.bind(model, given, cpus))


def _replicas(placement: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many engines there are: a number, or bounds between which headroom decides."""
    bounds = placement.get("autoscaling")
    if bounds is None:
        return {"num_replicas": int(placement.get("replicas", 1))}
    least, _, most = str(bounds).partition("-")
    if not least.isdigit() or not most.isdigit():
        raise ConfigError(f"autoscaling is two numbers of replicas, such as 1-4, not {bounds!r}")
    kwargs = {"tpot_ms": float(placement["tpot_ms"])} if "tpot_ms" in placement else {}
    policy = {"policy_function": POLICY, "policy_kwargs": kwargs}
    return {"autoscaling_config": {"min_replicas": int(least), "max_replicas": int(most), "policy": policy}}


def _value(value: Any) -> Any:
    """Return an argument of a command line as YAML would read it."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return int(value)
    except ValueError:
        return value
