"""Chat templates: the conventions they are written for, and errors that a user understands."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.chat_template import ChatTemplate
from common.model_config import ModelError

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        HELLO if messages is None else messages, **variables
    )


def test_messages_are_written_out() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": "Grüße 🙂"}]
    assert render(source, messages) == "[user]Hello[assistant]Grüße 🙂"


def test_the_reply_is_opened_only_when_asked_for() -> None:
    source = "{{ messages[0].content }}{% if add_generation_prompt %}<assistant>{% endif %}"
    assert render(source) == "Hello<assistant>"
    assert render(source, add_generation_prompt=False) == "Hello"


def test_special_tokens_and_variables_of_the_request_are_known() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ '!' if enable_thinking }}"
    assert render(source) == "<s>Hello</s>"
    assert render(source, enable_thinking=True) == "<s>Hello</s>!"


def test_blocks_leave_no_blank_lines_or_indentation() -> None:
    assert render("{% if true %}\n    {% if true %}\nx\n    {% endif %}\n{% endif %}\ny") == "x\ny"


def test_loops_can_be_left_early() -> None:
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    assert render(source, [*HELLO, *HELLO]) == "Hello"


def test_json_keeps_characters_and_takes_an_indent() -> None:
    tool = {"name": "größe", "text": "<b>&'"}
    assert render("{{ tools[0] | tojson }}", tools=[tool]) == json.dumps(tool, ensure_ascii=False)
    assert render("{{ tools[0] | tojson(indent=2) }}", tools=[tool]) == json.dumps(
        tool, ensure_ascii=False, indent=2
    )


def test_training_marks_are_transparent() -> None:
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHellob"


def test_the_date_can_be_asked_for() -> None:
    assert render("{{ strftime_now('%Y') }}") >= "2024"


def test_tools_choose_the_template_made_for_them() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools: {{ tools | length }}"}, {})
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{"type": "function"}]) == "tools: 1"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_what_a_template_refuses_is_a_value_error_with_its_words(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        render(source)


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% set _ = messages.__init__.__globals__ %}"],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source: str) -> None:
    with pytest.raises(ValueError, match="unsafe"):
        render(source + "{{ _ }}")


def test_a_broken_template_is_an_error_of_the_model() -> None:
    with pytest.raises(ModelError, match="chat template: line 2"):
        ChatTemplate({"default": "\n{% for %}"}, {})


def save(directory: Path, settings: dict[str, Any] | None = None, **files: str) -> ChatTemplate | None:
    if settings is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content)
    return ChatTemplate.load(directory)


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert save(tmp_path) is None
    assert save(tmp_path, {"bos_token": "<s>", "chat_template": None}) is None


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    places = [
        save(tmp_path, {"chat_template": "in settings {{ bos_token }}", "bos_token": {"content": "<s>"}}),
        save(tmp_path, {"chat_template": [{"name": "default", "template": "in a list"}]}),
        save(tmp_path, chat_template__json=json.dumps({"chat_template": "in json"})),
        save(tmp_path, chat_template__jinja="in a file"),
    ]
    assert [place.render(HELLO) for place in places if place] == [
        "in settings <s>",
        "in a list",
        "in json",
        "in a file",
    ]


def test_a_list_without_a_default_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat templates rag, but none is named default"):
        save(tmp_path, {"chat_template": [{"name": "rag", "template": ""}]})
