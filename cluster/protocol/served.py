"""The models that one ingress serves, found by the names that clients use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.errors import model_not_allowed, model_not_found
from cluster.generation import ModelCard
from cluster.tenants import Tenant
from cluster.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One of them. `card` is asked at every request, because what the pools can hold changes."""

    tokenizer: Tokenizer
    card: Callable[[], ModelCard]


class ServedModels:
    """All of them. ValueError when two go by one name."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = tuple(models)
        names = [name for model in models for name in model.card().names]
        if len(set(names)) != len(names):
            raise ValueError(f"two models go by one name: {', '.join(sorted(names))}")

    def allowed(self, tenant: Tenant) -> tuple[tuple[str, ModelCard], ...]:
        """Every name that `tenant` may use, with its model's card."""
        cards = [model.card() for model in self._models]
        return tuple((name, card) for card in cards if tenant.may_use(card.names) for name in card.names)

    def pick(self, name: str, tenant: Tenant) -> tuple[Tokenizer, ModelCard]:
        """The model that is called `name`, its card as of now. Raises ApiError when there is none (404) or when it is
        not for `tenant` (403)."""
        for model in self._models:
            card = model.card()
            if name in card.names:
                if not tenant.may_use(card.names):
                    raise model_not_allowed(name, self._names(tenant))
                return model.tokenizer, card
        raise model_not_found(name, self._names(tenant))

    def _names(self, tenant: Tenant) -> tuple[str, ...]:
        return tuple(name for name, _ in self.allowed(tenant))
