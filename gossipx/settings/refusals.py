"""The choice of a mode from given settings, and the refusal of settings that it does not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from gossipx.errors import UsageError
from gossipx.settings.modes import MODES, Elastic, Mode, Pairs, Pulls, Pushes, Server, Waves
from gossipx.settings.sections import KEYS


def mode_of(values: Mapping[str, Any], given: Collection[str]) -> Mode:
    """Return the mode that values choose.

    Args:
        values: settings by name; others have their defaults.
        given: names of those that a user has given; a value that is not the default counts in any case.

    Raises:
        UsageError: a given setting has no effect in that mode.
    """
    kind = _kind_of(values)
    own = {field.name for field in dataclasses.fields(kind)}
    for name, key in KEYS.items():
        value = values.get(name, key.default)
        has = name in own or name in kind.also or kind.chosen_by == (name, value) or not _of_modes(name)
        if not has and (name in given or value != key.default):
            raise UsageError(_refusal(name, kind, values))
    if (weights := values.get("weights", kind.weights_allowed[0])) not in kind.weights_allowed and "weights" in own:
        home = next(one for one in MODES if weights in one.weights_allowed)
        mode = values.get("mode", "pull")
        raise UsageError(f"--weights {weights} needs --mode {home.chosen_by[1]}, not {mode}: leave one out")
    return kind(**{name: values[name] for name in own & values.keys()})


def _kind_of(values: Mapping[str, Any]) -> type[Mode]:
    mode = values.get("mode", "pull")
    if values.get("servers") is not None or mode == "server":
        return Server
    if values.get("hub") is not None:
        return Elastic
    if values.get("exchange") == "waves":
        return Waves
    return {"push": Pushes, "pushpull": Pairs}.get(mode, Pulls)


def _of_modes(name: str) -> list[type[Mode]]:
    """Return the modes that have a setting; none: it has nothing to do with them."""
    choosing = (kind for kind in MODES if name in ("mode", "exchange"))
    return [*choosing, *(kind for kind in MODES if name in kind.__dataclass_fields__)]


def _refusal(name: str, kind: type[Mode], values: Mapping[str, Any]) -> str:
    homes = _of_modes(name)
    text = f"{kind.purpose or KEYS[name].purpose}, and {kind.instead}: {kind.remedy}"
    text = kind.reasons.get(name) or (homes[0].needed if len(homes) == 1 else text)
    around = next((shown(one, values[one]) for one in ("hub", "servers") if values.get(one)), "--mode server")
    value = values.get(name, KEYS[name].default)
    option = shown(name, value) if isinstance(value, bool) else KEYS[name].option
    return text.format(shown=shown(name, value), option=option, mode=values.get("mode", "pull"), around=around)


def shown(name: str, value: Any) -> str:
    """Return a setting as an option with its value."""
    option = KEYS[name].option
    if isinstance(value, bool):
        return option if value else option.replace("--", "--no-", 1)
    return f"{option} {','.join(map(str, value)) if isinstance(value, tuple) else value}"
