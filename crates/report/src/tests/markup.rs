//! A strict reader of the markup that a report uses: enough of HTML to find what a browser would silently
//! repair.

/// The elements' text and the tags of a document, or what is wrong with it.
pub(super) struct Document {
    pub(super) text: String,
    /// Tag names with their attributes.
    pub(super) tags: Vec<(String, Vec<(String, String)>)>,
}

const VOID: [&str; 4] = ["meta", "input", "br", "link"];

/// Reads `html`: every element closed in order, every attribute quoted and named once, no bare `<` or `&` in
/// text.
pub(super) fn read(html: &str) -> Result<Document, String> {
    let mut rest = html.strip_prefix("<!DOCTYPE html>\n").ok_or("no doctype")?;
    let mut document = Document { text: String::new(), tags: Vec::new() };
    let mut open: Vec<String> = Vec::new();
    while !rest.is_empty() {
        let text_end = rest.find('<').unwrap_or(rest.len());
        document.text += &unescape(&rest[..text_end])?;
        rest = &rest[text_end..];
        if let Some(closing) = rest.strip_prefix("</") {
            let (name, tail) = closing.split_once('>').ok_or("unfinished closing tag")?;
            let opened = open.pop().ok_or(format!("</{name}> closes nothing"))?;
            if opened != name {
                return Err(format!("</{name}> closes <{opened}>"));
            }
            rest = tail;
        } else if rest.starts_with('<') {
            let (name, attributes, closed, tail) = tag(&rest[1..])?;
            rest = tail;
            if name == "style" || name == "script" {
                rest = rest.split_once(&format!("</{name}>")).ok_or(format!("unfinished <{name}>"))?.1;
            } else if !closed && !VOID.contains(&name.as_str()) {
                open.push(name.clone());
            }
            document.tags.push((name, attributes));
        }
    }
    if open.is_empty() { Ok(document) } else { Err(format!("never closed: {open:?}")) }
}

/// Name, attributes, whether it ends in `/>`, and what follows.
fn tag(source: &str) -> Result<(String, Vec<(String, String)>, bool, &str), String> {
    let name_end = source.find(|c: char| !c.is_ascii_alphanumeric()).ok_or("unfinished tag")?;
    let (name, mut rest) = source.split_at(name_end);
    if name.is_empty() {
        return Err(format!("bare < before {:?}", rest.chars().take(20).collect::<String>()));
    }
    let mut attributes: Vec<(String, String)> = Vec::new();
    loop {
        if let Some(tail) = rest.strip_prefix("/>") {
            return Ok((name.to_owned(), attributes, true, tail));
        }
        if let Some(tail) = rest.strip_prefix('>') {
            return Ok((name.to_owned(), attributes, false, tail));
        }
        rest = rest
            .strip_prefix(' ')
            .ok_or(format!("in <{name}>: {:?}", rest.chars().take(20).collect::<String>()))?;
        let key_end =
            rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '-').ok_or("unfinished attribute")?;
        let (key, tail) = rest.split_at(key_end);
        let value = match tail.strip_prefix("=\"") {
            Some(quoted) => {
                let (value, tail) = quoted.split_once('"').ok_or("unfinished attribute value")?;
                rest = tail;
                unescape(value)?
            }
            None => {
                rest = tail;
                String::new()
            }
        };
        if key.is_empty() || attributes.iter().any(|(other, _)| other == key) {
            return Err(format!("attribute {key:?} of <{name}>"));
        }
        attributes.push((key.to_owned(), value));
    }
}

fn unescape(text: &str) -> Result<String, String> {
    if let Some(control) = text.chars().find(|c| c.is_control() && !matches!(c, '\n' | '\t')) {
        return Err(format!("{control:?} in text"));
    }
    let mut parts = text.split('&');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, tail) = part.split_once(';').ok_or(format!("bare & in {text:?}"))?;
        out += match name {
            "amp" => "&",
            "lt" => "<",
            "gt" => ">",
            "quot" => "\"",
            "#39" => "'",
            other => return Err(format!("unknown entity {other:?}")),
        };
        out += tail;
    }
    Ok(out)
}

#[test]
fn the_reader_finds_what_is_wrong() {
    for bad in [
        "<p>",
        "</p>",
        "<p></b>",
        "<p a=1></p>",
        "<p a=\"1\" a=\"2\"></p>",
        "a & b",
        "a < b",
        "<p>\u{1b}</p>",
        "&nope;",
    ] {
        assert!(read(&format!("<!DOCTYPE html>\n{bad}")).is_err(), "{bad}");
    }
    let good = read("<!DOCTYPE html>\n<p a=\"&lt;\">1 &amp; 2<b>!</b></p><style>p > b { }</style>").unwrap();
    assert_eq!(good.text, "1 & 2!");
    assert_eq!(good.tags[0].1, [("a".to_owned(), "<".to_owned())]);
}
