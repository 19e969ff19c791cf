"""The Ray Serve application: a deployment of engines, and a deployment of fronts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.ray.front import Door, FrontReplica
from paceline.ray.front_options import NAMES, UNPUBLISHED, FrontOptions, of_arguments
from paceline.ray.replica import MAX_CALLS, EngineReplica
from paceline.serve.asking import config_of
from paceline.serve.fleet.fleet_options import MAX_REPLICAS
from ray import serve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.engine.assembly.config import EngineConfig

# Arguments of `serve run` and of `args` in a Serve YAML, beside the options of `AsyncLLM`.
PLACEMENT = ("replicas", "fronts", "cpus", "autoscaling", "tpot_ms")
TEXTS = ("model", "api_key", "api_key_file", "served_model_name")  # arguments that are never numbers
HEALTH_S = 1.0  # between two health checks of a replica
POLICY = "paceline.ray:Headroom"
MOST_NUMBER = 1e6  # largest `cpus`, and largest `tpot_ms`
_BOUNDS = re.compile("([0-9]{1,4})-([0-9]{1,4})")
_FRACTION = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}")


def app(args: Mapping[str, Any]) -> Any:
    """Return the application for `serve run paceline.ray:app` or a Serve YAML. Raises `ConfigError`.

    args: `model`, options of `AsyncLLM`, and those of `PLACEMENT` and `NAMES`; values may be texts.
    """
    given = {name: value if name in TEXTS else _value(value) for name, value in args.items()}
    placement = {name: given.pop(name) for name in PLACEMENT if name in given}
    front = {name: given.pop(name) for name in NAMES if name in given}
    model, cpus = str(given.pop("model", "default")), _positive(placement, "cpus")
    given.setdefault("threads", max(1, int(cpus)))
    config = config_of(model, given, (*PLACEMENT, *NAMES, "model"))
    if config.kv_events is not None:
        raise ConfigError(f"kv_events_config does not go with Ray: {UNPUBLISHED}")
    options, fronts = of_arguments(front), _count(placement, "fronts")
    options.fleet.check_law(config.law)
    if options.operation.rl and fronts != 1:
        raise ConfigError("rl=true goes with fronts=1: the parts of an update must come to one front")
    return application(config, options, _replicas(placement), cpus, fronts)


def application(
    config: EngineConfig, options: FrontOptions, replicas: Mapping[str, Any], cpus: float, fronts: int = 1
) -> Any:
    """Return an application of engines and fronts. replicas: as in `engines`."""
    served = serve.deployment(
        name="Front",
        num_replicas=fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_CALLS,
    )(serve.ingress(Door())(FrontReplica))
    return served.bind(options, engines(config, replicas, cpus))


def engines(config: EngineConfig, replicas: Mapping[str, Any], cpus: float, *, owned: bool = False) -> Any:
    """Return an application of engines alone.

    replicas: arguments of the engines' deployment. owned: the application ends with the command that places it.
    """
    deployment = serve.deployment(
        name="Engine",
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=HEALTH_S,
        max_ongoing_requests=MAX_CALLS,
        **replicas,
    )
    return deployment(EngineReplica).bind(config, cpus, owned)


def _replicas(placement: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many engines there are: a number, or bounds between which headroom decides."""
    bounds = placement.get("autoscaling")
    if bounds is None:
        if "tpot_ms" in placement:
            raise ConfigError("tpot_ms decides how many engines there are: it goes with autoscaling, such as 1-4")
        return {"num_replicas": _count(placement, "replicas")}
    if "replicas" in placement:
        raise ConfigError("autoscaling chooses the replicas between its bounds: leave out replicas")
    found = _BOUNDS.fullmatch(str(bounds))
    least, most = map(int, found.groups()) if found else (0, 0)
    if not 1 <= least <= most <= MAX_REPLICAS:
        raise ConfigError(f"autoscaling is two numbers of replicas, such as 1-4, not {bounds!r}")
    kwargs = {"tpot_ms": _positive(placement, "tpot_ms")} if "tpot_ms" in placement else {}
    policy = {"policy_function": POLICY, "policy_kwargs": kwargs}
    return {"autoscaling_config": {"min_replicas": least, "max_replicas": most, "policy": policy}}


def _count(placement: Mapping[str, Any], name: str) -> int:
    value = placement.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_REPLICAS:
        raise ConfigError(f"{name} is a number from 1 to {MAX_REPLICAS}, not {value!r}")
    return value


def _positive(placement: Mapping[str, Any], name: str) -> float:
    value = placement.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_NUMBER:
        raise ConfigError(f"{name} is a number above 0, not {value!r}")
    return float(value)


def _value(value: Any) -> Any:
    """Return an argument of a command line as YAML would read it."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if _FRACTION.fullmatch(value):
        return float(value)
    try:
        return int(value)
    except ValueError:
        return value
