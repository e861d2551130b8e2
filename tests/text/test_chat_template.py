"""Properties of ChatTemplate and of the way from messages to prompt ids."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from pyengine.errors import InvalidRequest, ModelError
from pyengine.text import ChatTemplate, Tokenizer

from .conftest import FolderWriter, llama_backend

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Any = USER, **arguments: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **arguments)


def test_a_conversation_renders_with_and_without_the_generation_prompt() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render(CHATML, messages) == text + "<|im_start|>assistant\n"
    assert render(CHATML, messages, add_generation_prompt=False) == text


def test_blocks_take_their_line_and_indentation_with_them() -> None:
    assert (
        render("{%- for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}") == "Hi\n"
    )


def test_loop_controls_and_generation_blocks_are_understood() -> None:
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    assert render(source, USER * 3) == "Hi"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"


def test_special_tokens_are_variables_and_a_missing_one_renders_as_nothing() -> None:
    assert render("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}") == "<s>|</s>|"
    assert ChatTemplate("{{ bos_token }}x").render(USER) == "x"


def test_tojson_keeps_html_and_unicode_and_takes_an_indent() -> None:
    messages = [{"role": "user", "content": "<b>'é'</b>"}]
    assert render("{{ messages[0].content | tojson }}", messages) == "\"<b>'é'</b>\""
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_strftime_now_gives_the_local_date() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_text_parts_are_joined_and_none_counts_as_missing() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"
    source = "{{ 'content' in messages[0] }}{{ messages[0].tool_calls[0].name }}"
    assert render(source, [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]) == "Falsef"


def test_the_messages_of_the_caller_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    render(CHATML, messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]


def test_tools_and_variables_reach_a_template_that_reads_them() -> None:
    source = "{{ tools[0].name }}{{ enable_thinking }}{{ documents is none }}"
    assert render(source, tools=[{"name": "f"}], enable_thinking=False) == "fFalseTrue"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"enable_thinking": False}, "enable_thinking"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tokenize": True}, "tokenize"),
    ],
)
def test_what_the_template_does_not_read_is_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(CHATML, **arguments)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ("Hi", "must be a list"),
        ({"role": "user", "content": "Hi"}, "must be a list"),
        ([], "empty"),
        ([*USER, "Hi"], r"messages\[1\]"),
        ([{"content": "Hi"}], r"messages\[0\] needs a `role`"),
        ([{"role": 3, "content": "Hi"}], r"messages\[0\] needs a `role`"),
        ([{"role": "user"}], r"messages\[0\] has no `content`"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no `content`"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content\[0\].*image_url"),
        ([{"role": "user", "content": "Hi", "extra": object()}], r"messages\[0\]\.extra"),
        ([{"role": "user", "content": "Hi", "extra": {1: 2}}], r"messages\[0\]\.extra"),
    ],
)
def test_a_malformed_message_is_refused_with_its_index(messages: Any, part: str) -> None:
    with pytest.raises(InvalidRequest, match=part) as caught:
        render(CHATML, messages)
    assert caught.value.field == "messages"


def test_a_message_that_holds_itself_is_refused() -> None:
    message: dict[str, Any] = {"role": "user", "content": "Hi"}
    message["self"] = message
    with pytest.raises(InvalidRequest, match="nests deeper than 64"):
        render(CHATML, [message])


def test_a_refusal_of_the_template_carries_its_message_and_line() -> None:
    with pytest.raises(InvalidRequest, match=r"line 2: roles must alternate") as caught:
        render("{% if messages %}\n{{ raise_exception('roles must alternate') }}\n{% endif %}")
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.missing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
        "{{ undefined | tojson }}",
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_a_typed_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match="line 1") as caught:
        render(source)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% for i in range(10 ** 40) %}x{% endfor %}",
        "{% for i in range(3000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 9 ** 9 ** 9 ** 9 ** 9 }}",
        "{% for i in range(300) %}{{ 'x' * 99999 }}{% endfor %}",
    ],
)
def test_work_without_end_is_stopped_at_a_named_limit(source: str) -> None:
    with pytest.raises(InvalidRequest, match="limit of"):
        render(source)


def test_each_rendering_has_the_whole_loop_budget() -> None:
    template = ChatTemplate("{% for i in range(600000) %}{% endfor %}ok")
    assert [template.render(USER) for _ in range(3)] == ["ok"] * 3


@pytest.mark.parametrize(
    ("source", "line"), [("a\n{% if %}", 2), ("{% for m in messages %}", 1), ("\n\n{{ x | nofilter }}", 3), ("{{", 1)]
)
def test_a_template_that_does_not_compile_is_a_model_error_with_its_line(source: str, line: int) -> None:
    with pytest.raises(ModelError, match=f"line {line}"):
        ChatTemplate(source, source_name="chat template of m")


def llama_folder(write_folder: FolderWriter, template: Any, **files: str) -> Tokenizer:
    backend = llama_backend()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    return Tokenizer.from_folder(write_folder(backend, config, **files))


def test_templated_text_is_encoded_without_a_second_bos(write_folder: FolderWriter) -> None:
    tokenizer = llama_folder(write_folder, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    ids = tokenizer.apply_chat_template(USER)
    assert ids == [1, *tokenizer.encode("Hi", add_special_tokens=False), 2]
    assert tokenizer.encode("Hi")[0] == 1


def test_a_template_without_bos_gets_none(write_folder: FolderWriter) -> None:
    tokenizer = llama_folder(write_folder, "{{ messages[0].content }}")
    assert tokenizer.apply_chat_template(USER) == tokenizer.encode("Hi", add_special_tokens=False)


def test_a_tokenizer_without_a_template_says_so(write_folder: FolderWriter) -> None:
    tokenizer = llama_folder(write_folder, None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.apply_chat_template(USER)
    assert caught.value.field == "messages"


def test_a_broken_template_hurts_only_chat(write_folder: FolderWriter) -> None:
    tokenizer = llama_folder(write_folder, "{% if %}")
    assert tokenizer.encode("Hi")
    with pytest.raises(ModelError, match="does not compile"):
        tokenizer.apply_chat_template(USER)


def test_a_lone_surrogate_in_a_message_is_refused(write_folder: FolderWriter) -> None:
    tokenizer = llama_folder(write_folder, "{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match=r"U\+D800") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "a\ud800"}])
    assert caught.value.field == "messages"


def test_templates_are_chosen_by_name_and_by_the_presence_of_tools(write_folder: FolderWriter) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{% if tools %}tools{% endif %}"},
    ]
    tokenizer = llama_folder(write_folder, named)
    assert tokenizer.render_chat(USER) == "plain"
    assert tokenizer.render_chat(USER, tools=[{"name": "f"}]) == "tools"
    assert tokenizer.render_chat(USER, template_name="tool_use") == ""
    with pytest.raises(InvalidRequest, match="default, tool_use") as caught:
        tokenizer.render_chat(USER, template_name="rag")
    assert caught.value.field == "template_name"


def test_a_template_file_outranks_the_tokenizer_config(write_folder: FolderWriter) -> None:
    assert llama_folder(write_folder, "config").render_chat(USER) == "config"
    json_file = {"chat_template.json": '{"chat_template": "json"}'}
    assert llama_folder(write_folder, "config", **json_file).render_chat(USER) == "json"
    assert llama_folder(write_folder, "config", **{"chat_template.jinja": "jinja"}).render_chat(USER) == "jinja"


@pytest.mark.parametrize("template", [3, {"default": "x"}, [{"name": "default"}], ["x"]])
def test_a_chat_template_entry_of_another_shape_is_a_model_error(write_folder: FolderWriter, template: Any) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template"):
        llama_folder(write_folder, template)
