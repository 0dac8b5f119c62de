//! The few protobuf messages that a TensorBoard event needs, encoded by hand.
//!
//! ```text
//! Event       { double wall_time = 1; int64 step = 2; oneof { string file_version = 3; Summary summary = 5; SessionLog session_log = 7 } }
//! SessionLog  { SessionStatus status = 1 }                                    START = 1
//! Summary     { repeated Value value = 1 }
//! Value       { string tag = 1; float simple_value = 2; TensorProto tensor = 8; SummaryMetadata metadata = 9 }
//! SummaryMetadata { PluginData plugin_data = 1 }      PluginData { string plugin_name = 1 }
//! TensorProto { DataType dtype = 1; TensorShapeProto tensor_shape = 2; repeated bytes string_val = 8 }     DT_STRING = 7
//! ```

const EVENT_WALL_TIME: u32 = 1;
const EVENT_STEP: u32 = 2;
const EVENT_FILE_VERSION: u32 = 3;
const EVENT_SUMMARY: u32 = 5;
const EVENT_SESSION_LOG: u32 = 7;
const SUMMARY_VALUE: u32 = 1;
const VALUE_TAG: u32 = 1;
const VALUE_SIMPLE: u32 = 2;
const VALUE_TENSOR: u32 = 8;
const VALUE_METADATA: u32 = 9;

/// The first event of every file.
pub fn file_version(wall_time: f64) -> Vec<u8> {
    let mut event = event(wall_time, 0);
    event.bytes(EVENT_FILE_VERSION, b"brain.Event:2");
    event.0
}

/// The event that voids the records of `step` and all later steps in earlier files.
pub fn session_start(wall_time: f64, step: u64) -> Vec<u8> {
    let mut status = Message::default();
    status.varint(1, 1);
    let mut event = event(wall_time, step);
    event.bytes(EVENT_SESSION_LOG, &status.0);
    event.0
}

/// An event with one scalar for each tag.
pub fn scalars(wall_time: f64, step: u64, values: &[(&str, f64)]) -> Vec<u8> {
    let mut summary = Message::default();
    for &(tag, scalar) in values {
        let mut value = Message::default();
        value.bytes(VALUE_TAG, tag.as_bytes());
        value.float(VALUE_SIMPLE, scalar as f32);
        summary.bytes(SUMMARY_VALUE, &value.0);
    }
    summary_event(wall_time, step, &summary)
}

/// An event with a text, shown as Markdown.
pub fn text(wall_time: f64, step: u64, tag: &str, markdown: &str) -> Vec<u8> {
    let mut plugin = Message::default();
    plugin.bytes(1, b"text");
    let mut metadata = Message::default();
    metadata.bytes(1, &plugin.0);
    let mut tensor = Message::default();
    tensor.varint(1, 7);
    // A shape without dimensions: one string.
    tensor.bytes(2, &[]);
    tensor.bytes(8, markdown.as_bytes());
    let mut value = Message::default();
    value.bytes(VALUE_TAG, tag.as_bytes());
    value.bytes(VALUE_TENSOR, &tensor.0);
    value.bytes(VALUE_METADATA, &metadata.0);
    let mut summary = Message::default();
    summary.bytes(SUMMARY_VALUE, &value.0);
    summary_event(wall_time, step, &summary)
}

/// The step of an encoded event; `None` if the bytes are no message.
pub fn step_of(event: &[u8]) -> Option<u64> {
    let mut step = 0;
    let mut rest = event;
    while !rest.is_empty() {
        if let (EVENT_STEP, Field::Varint(value)) = take_field(&mut rest)? {
            step = value;
        }
    }
    Some(step)
}

/// The tag of an encoded event's first value; `None` without a value, or if the bytes are no message.
pub fn tag_of(event: &[u8]) -> Option<&str> {
    let tag = [EVENT_SUMMARY, SUMMARY_VALUE, VALUE_TAG].into_iter().try_fold(event, bytes_in)?;
    std::str::from_utf8(tag).ok()
}

/// A field's value, as far as these messages need it.
enum Field<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    Fixed,
}

/// The first field of a message that has this number and holds bytes.
fn bytes_in(message: &[u8], number: u32) -> Option<&[u8]> {
    let mut rest = message;
    loop {
        match take_field(&mut rest)? {
            (found, Field::Bytes(bytes)) if found == number => return Some(bytes),
            _ => {}
        }
    }
}

/// The next field of a message: its number and its value.
fn take_field<'a>(rest: &mut &'a [u8]) -> Option<(u32, Field<'a>)> {
    let key = take_varint(rest)?;
    let number = u32::try_from(key >> 3).ok()?;
    let fixed = |length: usize| (length, None);
    let (length, field) = match key & 7 {
        0 => (0, Some(Field::Varint(take_varint(rest)?))),
        1 => fixed(8),
        2 => {
            let length = usize::try_from(take_varint(rest)?).ok()?;
            (length, Some(Field::Bytes(rest.get(..length)?)))
        }
        5 => fixed(4),
        _ => return None,
    };
    *rest = rest.get(length..)?;
    Some((number, field.unwrap_or(Field::Fixed)))
}

fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7F) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

fn summary_event(wall_time: f64, step: u64, summary: &Message) -> Vec<u8> {
    let mut event = event(wall_time, step);
    event.bytes(EVENT_SUMMARY, &summary.0);
    event.0
}

fn event(wall_time: f64, step: u64) -> Message {
    let mut event = Message::default();
    event.double(EVENT_WALL_TIME, wall_time);
    if step > 0 {
        event.varint(EVENT_STEP, step);
    }
    event
}

/// A message as its encoded fields.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, field: u32, value: u64) {
        self.key(field, 0);
        self.raw_varint(value);
    }

    fn double(&mut self, field: u32, value: f64) {
        self.key(field, 1);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, field: u32, value: &[u8]) {
        self.key(field, 2);
        self.raw_varint(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    fn float(&mut self, field: u32, value: f32) {
        self.key(field, 5);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn key(&mut self, field: u32, wire_type: u32) {
        self.raw_varint(u64::from(field << 3 | wire_type));
    }

    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}
