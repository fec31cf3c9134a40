//! Templates see messages as the Python reference shows them, and requests cannot misuse them.

use serde_json::{Map, Value, json};
use twinfer_protocol::ApiError;
use twinfer_text::{ChatTemplate, TemplateError, TemplateState};

fn render(template: &str, messages: &Value) -> Result<String, TemplateError> {
    ChatTemplate::from_source(template, "<s>", "</s>").render(messages, true, None, None)
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "callers build the value in place"
)]
fn user(content: Value) -> Value {
    json!([{"role": "user", "content": content}])
}

fn print(expression: &str, content: Value) -> String {
    render(
        &format!("{{% set c = messages[0].content %}}{{{{ {expression} }}}}"),
        &user(content),
    )
    .unwrap()
}

#[test]
fn values_print_as_in_python() {
    for (expression, text) in [
        ("none", "None"),
        ("true", "True"),
        ("1.0", "1.0"),
        ("[1, 'a', none, false]", "[1, 'a', None, False]"),
        ("{'a': 'it\\'s', 'b': [2.5]}", "{'a': \"it's\", 'b': [2.5]}"),
        ("undefined_name", ""),
        ("c.split(' ')[1:] | join('-')", "b-c"),
        ("c.startswith('a b')", "True"),
        ("c[::-1]", "c b a"),
        ("c.removeprefix('a ').removesuffix(' c')", "b"),
        ("c.partition(' ')[2]", "b c"),
        ("c | upper ~ 1", "A B C1"),
        ("'%s-%d' | format('x', 3)", "x-3"),
        ("c.replace('b', 'd').title()", "A D C"),
        ("(none | string) ~ '.'", "None."),
    ] {
        assert_eq!(print(expression, json!("a b c")), text, "{expression}");
    }
}

#[test]
fn tojson_is_pythons_dumps() {
    let value = json!({"z": "<a> & 'b' \"q\" \n\u{1}é中", "a": [1, 2.0, true, null, {}], "e": []});
    let messages = json!([{"role": "user", "content": "", "v": value}]);
    let dump = |arguments: &str| {
        render(
            &format!("{{{{ messages[0].v | tojson{arguments} }}}}"),
            &messages,
        )
        .unwrap()
    };
    assert_eq!(
        dump(""),
        r#"{"z": "<a> & 'b' \"q\" \n\u0001é中", "a": [1, 2.0, true, null, {}], "e": []}"#
    );
    assert_eq!(
        dump("(indent=2, sort_keys=true)"),
        "{\n  \"a\": [\n    1,\n    2.0,\n    true,\n    null,\n    {}\n  ],\n  \"e\": [],\n  \"z\": \"<a> & 'b' \\\"q\\\" \\n\\u0001é中\"\n}"
    );
    assert!(
        dump("(ensure_ascii=true, separators=(',', ':'))")
            .ends_with(r#"\u0001\u00e9\u4e2d","a":[1,2.0,true,null,{}],"e":[]}"#)
    );
    assert!(
        matches!(render("{{ missing | tojson }}", &user(json!("x"))), Err(TemplateError::Failed(m)) if m.contains("undefined"))
    );
}

#[test]
fn blocks_are_trimmed_and_loops_can_be_controlled() {
    let template = "{%- for m in messages %}\n    {% if m.role == 'system' %}\n        {% continue %}\n    {% endif %}\n{{ loop.index }}{{ m.content }}\n    {% if loop.index == 2 %}{% break %}{% endif %}\n{% endfor %}";
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "user", "content": "v"}]);
    assert_eq!(render(template, &messages).unwrap(), "2u\n");
}

#[test]
fn the_date_is_that_of_the_clock() {
    let year: u32 = render("{{ strftime_now('%Y') }}", &user(json!("x")))
        .unwrap()
        .parse()
        .unwrap();
    assert!((2024..2200).contains(&year));
}

#[test]
fn parts_are_joined_unless_the_template_reads_them() {
    let parts = json!([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]);
    assert_eq!(
        render("{{ messages[0].content }}", &user(parts.clone())).unwrap(),
        "one\ntwo"
    );
    let reads = "{% for p in messages[0].content %}{% if p is mapping %}[{{ p.text }}]{% else %}{{ p }}{% endif %}{% endfor %}";
    assert_eq!(render(reads, &user(parts)).unwrap(), "[one][two]");
    let image = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
    let error = ApiError::from(render("{{ messages[0].content }}", &user(image)).unwrap_err());
    assert_eq!(
        (error.kind.status(), error.param.as_deref()),
        (400, Some("messages[0].content[0].type"))
    );
    assert!(error.message.contains("image_url"), "{}", error.message);
}

#[test]
fn null_content_is_empty_and_tool_arguments_are_objects() {
    let call = json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": \"x\"}"}}]);
    let template = "{% for m in messages %}<{{ m.content }}>{% for t in m.tool_calls or [] %}{{ t.function.arguments | tojson }}{% endfor %}{% endfor %}";
    let with = |content: Value| json!([{"role": "user", "content": null}, {"role": "assistant", "content": content, "tool_calls": call.clone()}]);
    let text = r#"<><>{"b": 1, "a": "x"}"#;
    assert_eq!(render(template, &with(Value::Null)).unwrap(), text);
    let mut absent = with(Value::Null);
    absent[1].as_object_mut().unwrap().remove("content");
    assert_eq!(render(template, &absent).unwrap(), text);
    let broken = json!([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{no"}}]}]);
    assert_eq!(render(template, &broken).unwrap(), "<>\"{no\"");
}

#[test]
fn malformed_messages_name_the_field() {
    for (messages, param) in [
        (json!("x"), "messages"),
        (json!([]), "messages"),
        (json!(["x"]), "messages[0]"),
        (
            json!([{"role": "user", "content": "a"}, {"content": "x"}]),
            "messages[1].role",
        ),
        (json!([{"role": 1, "content": "x"}]), "messages[0].role"),
        (user(json!(5)), "messages[0].content"),
        (
            user(json!([{"type": "text"}])),
            "messages[0].content[0].text",
        ),
    ] {
        let error = ApiError::from(render("{{ messages }}", &messages).unwrap_err());
        assert_eq!(
            (error.kind.status(), error.param.as_deref()),
            (400, Some(param)),
            "{messages}"
        );
    }
}

#[test]
fn a_template_may_refuse_and_its_words_reach_the_client() {
    let template = "{% if messages[0].role != 'user' %}{{ raise_exception('Roles must alternate') }}{% endif %}ok";
    assert_eq!(render(template, &user(json!("x"))).unwrap(), "ok");
    let error = render(template, &json!([{"role": "assistant", "content": "x"}])).unwrap_err();
    assert_eq!(
        error,
        TemplateError::Refused("Roles must alternate".to_owned())
    );
}

#[test]
fn kwargs_are_variables_but_not_the_reserved_ones() {
    let template = ChatTemplate::from_source("{{ thinking }} {{ messages[0].content }}", "", "");
    let run = |kwargs: Value| {
        let map: Map<String, Value> = serde_json::from_value(kwargs).unwrap();
        template.render(&user(json!("x")), true, None, Some(&map))
    };
    assert_eq!(run(json!({"thinking": true})).unwrap(), "True x");
    for name in [
        "messages",
        "tools",
        "add_generation_prompt",
        "tokenize",
        "chat_template",
        "bos_token",
        "raise_exception",
    ] {
        let error = run(json!({"thinking": 1, name: []})).unwrap_err();
        assert_eq!(error, TemplateError::ReservedKwarg(name.to_owned()));
        assert_eq!(ApiError::from(error).kind.status(), 400);
    }
}

#[test]
fn generation_marks_are_ignored() {
    let template = "a {%- generation %}b{% endgeneration -%} c";
    assert_eq!(
        *ChatTemplate::from_source(template, "", "").state(),
        TemplateState::Ready
    );
    assert_eq!(render(template, &user(json!("x"))).unwrap(), "abc");
}

#[test]
fn a_bomb_that_goes_off_at_once_makes_the_template_unusable() {
    let bomb = "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}";
    assert!(matches!(
        ChatTemplate::from_source(bomb, "", "").state(),
        TemplateState::Broken(_)
    ));
}

#[test]
fn long_honest_chats_are_rendered() {
    let template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim + eos_token }}{% endfor %}";
    let template = ChatTemplate::from_source(template, "", "</s>");
    let one = json!([{"role": "user", "content": "x".repeat(16 << 20)}]);
    assert_eq!(
        template.render(&one, true, None, None).unwrap().len(),
        (16 << 20) + 12
    );
    let many: Vec<_> = (0..20_000)
        .map(|_| json!({"role": "user", "content": "hi"}))
        .collect();
    assert_eq!(
        template
            .render(&many.into(), true, None, None)
            .unwrap()
            .len(),
        20_000 * 14
    );
}
