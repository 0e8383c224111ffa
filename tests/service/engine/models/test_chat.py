import jinja2
import jinja2.sandbox
import pytest

from service.engine.models.chat import plain_parts, split_template
from service.engine.models.errors import SourceRefused
from service.engine.prompt import PromptParts

SYSTEM = "Answer from this.\n\n"

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<s>Default.</s>{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
MERGED = (
    "<s>{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if loop.first and system is defined %}{{ system }}\n\n{% endif %}"
    "{{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
SYSTEM_LAST = MERGED.replace("loop.first and", "loop.last and")
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def renderer(template: str):
    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    compiled = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True).from_string(template)

    def render(messages: list[dict[str, str]], header: bool) -> str:
        return compiled.render(
            messages=messages, add_generation_prompt=header, enable_thinking=False, raise_exception=refuse
        )

    return render


def conversation(parts: PromptParts) -> str:
    """Two questions, put together as the server does it."""
    first = parts.document_prefix + "DOC" + parts.document_suffix
    first += parts.question_prefix + "Q1" + parts.question_suffix + "A1" + parts.turn_end
    return first + parts.question_prefix + "Q2" + parts.question_suffix


def turns(opening: list[tuple[str, str]]) -> list[dict[str, str]]:
    spoken = [*opening, ("user", "Q1"), ("assistant", "A1"), ("user", "Q2")]
    return [{"role": role, "content": content} for role, content in spoken]


def test_the_document_is_the_system_message_and_a_default_one_is_displaced() -> None:
    parts = split_template(renderer(CHATML), SYSTEM)
    assert parts == PromptParts(
        document_prefix="<system>" + SYSTEM,
        document_suffix="</system>\n",
        question_prefix="<user>",
        question_suffix="</user>\n<assistant>",
        turn_end="</assistant>\n",
    )
    assert conversation(parts) == renderer(CHATML)(turns([("system", SYSTEM + "DOC")]), True)


def test_an_empty_thinking_block_belongs_to_the_header() -> None:
    parts = split_template(renderer(THINKING), SYSTEM)
    assert parts.question_suffix == "</>\n<assistant><think></think>"
    assert parts.turn_end == "</>\n"


def test_system_text_merged_into_the_first_question() -> None:
    parts = split_template(renderer(MERGED), SYSTEM)
    assert parts == PromptParts("<s>[INST] " + SYSTEM, "\n\n", "", " [/INST]", "</s>[INST] ")
    assert conversation(parts).replace("[/INST]A1", "[/INST] A1") == renderer(MERGED)(
        turns([("system", SYSTEM + "DOC")]), True
    )


@pytest.mark.parametrize("template", [SYSTEM_LAST, NO_SYSTEM])
def test_without_a_usable_system_role_the_document_is_the_first_user_turn(template: str) -> None:
    parts = split_template(renderer(template), SYSTEM)
    assert "Ask me." in parts.document_suffix
    rendered = renderer(template)(turns([("user", SYSTEM + "DOC"), ("assistant", "Ask me.")]), True)
    assert conversation(parts).replace("[/INST]A1", "[/INST] A1") == rendered


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}",
        "{{ broken(",
        "{{ nothing_like.this.exists }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_loses_the_document_is_refused(template: str) -> None:
    def render(messages: list[dict[str, str]], header: bool) -> str:
        return renderer(template)(messages, header)

    with pytest.raises(SourceRefused, match="does not keep the document before the questions"):
        split_template(render, SYSTEM)


def test_a_model_without_a_template() -> None:
    assert conversation(plain_parts("S ")) == "S DOC\n\nQuestion: Q1\nAnswer:A1\n\nQuestion: Q2\nAnswer:"
