"""What checks look at: the settings, the probes, and the model as the settings name it."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from cache_store.layout import KVType
from cache_store.speeds import PREFILL, SpeedBook
from service.doctor.findings import Finding
from service.doctor.probes import Probes
from service.engine.factory import resolve_dtype
from service.engine.models.errors import ModelError
from service.planning.cards import Card, with_memory
from service.planning.detect import card_of, this_processor
from service.planning.headers import read_model
from service.planning.model import ModelFacts
from service.planning.nvidia import CardState
from service.planning.placing import computes_on_card
from service.planning.plan import Plan, make_plan, not_computed
from service.planning.request import Wanted
from service.planning.visible import visible
from service.settings import Settings

PLANNED_TOKENS = 32_768
ANY_GBPS = 500.0
"""Of a card that nobody knows: what fits does not depend on it."""


@dataclass
class Context:
    """Facts that several checks use are found once. `model_dir`: the model looked at."""

    settings: Settings
    probes: Probes
    model_dir: Path
    _plan: Plan | str | None = field(default=None, init=False)
    not_computed: list[str] = field(default_factory=list, init=False)
    """Of the plan's problems those that no setting of its sizes changes."""

    @property
    def on_card(self) -> bool:
        """Whether it is the engine for cards alone."""
        return self.settings.engine == "exl2"

    @property
    def offloads(self) -> bool:
        """Whether llama.cpp computes on a card where it finds one, and takes its memory there."""
        settings = self.settings
        return settings.engine == "llamacpp" and computes_on_card(settings, self.probes.llama_backends())

    @property
    def draft_dir(self) -> Path | None:
        """The draft model that the engine loads; None without one."""
        return self.settings.draft_model_dir if self.settings.speculation != "off" else None

    def finding(self, check: str) -> "Say":
        return Say(check)

    def cards(self) -> list[CardState]:
        """Those that CUDA shows, in its order: the engine runs on the first."""
        return visible(self.probes.cards(), self.probes.environment())

    def card(self) -> Card | None:
        """The card or processor that the engine would use; None when it wants a card and there is none. What an engine
        that runs already holds of it counts as free."""
        if not self.on_card:
            return _with_free(this_processor(), self.probes.engines_nbytes())
        states = self.cards()
        return _with_free(card_of(states[0], ANY_GBPS), states[0].engines_nbytes) if states else None

    def plan(self) -> Plan | str:
        """The plan of the model with these settings, or why there is none."""
        if self._plan is None:
            self._plan = self._planned()
        return self._plan

    def _planned(self) -> Plan | str:
        if self.settings.engine == "fake":
            return "the fake engine has no model"
        if self.settings.engine == "llamacpp":
            return "the llamacpp engine takes its memory at the start: `preread plan --engine llamacpp` says how much"
        try:
            model = read_model(self.model_dir)
            draft = read_model(self.draft_dir) if self.draft_dir is not None else None
        except ModelError as error:
            return str(error)
        if (card := self.card()) is None:
            return "there is no NVIDIA card"
        wanted = replace(self._wanted(model), draft=draft)
        self.not_computed = not_computed(model, card, wanted)
        return make_plan(model, card, wanted)[0]

    def _wanted(self, model: ModelFacts) -> Wanted:
        """With a context that was chosen all of it, else as much as is usual, or as the model has."""
        settings = self.settings
        context = settings.max_context or min(model.max_context or PLANNED_TOKENS, PLANNED_TOKENS)
        return Wanted(
            context=min(context, model.max_context or context),
            kv_type=KVType(settings.kv_type),
            users=settings.max_batch,
            reserve_nbytes=settings.gpu_reserve_bytes,
            guesses=settings.speculation != "off",
            resident_nbytes=0,
            compute=resolve_dtype(settings.compute_dtype),
        )

    def prefill_tok_s(self) -> tuple[float, bool] | None:
        """Tokens a second of prefill, and whether they were measured here; None when nothing is known."""
        measured = SpeedBook(self.settings.store_dir / "speeds.json").speed(PREFILL)
        if measured is not None:
            return measured, True
        plan = self.plan()
        return None if isinstance(plan, str) else (plan.prefill.tok_s, False)


def _with_free(card: Card, nbytes: int) -> Card:
    return with_memory(card, card.memory_nbytes, min(card.free_nbytes + nbytes, card.memory_nbytes))


@dataclass(frozen=True, slots=True)
class Say:
    """Findings of one check."""

    check: str

    def ok(self, evidence: str) -> Finding:
        return Finding(self.check, "ok", evidence)

    def skip(self, evidence: str) -> Finding:
        return Finding(self.check, "skip", evidence)

    def warn(self, evidence: str, remedy: str) -> Finding:
        return Finding(self.check, "warn", evidence, remedy)

    def fail(self, evidence: str, remedy: str) -> Finding:
        return Finding(self.check, "fail", evidence, remedy)
