//! The few protobuf messages that a TensorBoard event needs, encoded by hand.
//!
//! ```text
//! Event       { double wall_time = 1; int64 step = 2; oneof { string file_version = 3; Summary summary = 5;
//! SessionLog session_log = 7 } } SessionLog  { SessionStatus status = 1 }
//! START = 1 Summary     { repeated Value value = 1 } Value       { string tag = 1; float simple_value = 2;
//! TensorProto tensor = 8; SummaryMetadata metadata = 9 } SummaryMetadata { PluginData plugin_data = 1 }
//! PluginData { string plugin_name = 1 } TensorProto { DataType dtype = 1; TensorShapeProto tensor_shape =
//! 2; repeated bytes string_val = 8 }     DT_STRING = 7
//! ```
//!
//! The plugin "hparams" reads its messages from the content of its plugin data:
//!
//! ```text
//! PluginData        { string plugin_name = 1; bytes content = 2 } HParamsPluginData { int32 version = 1;
//! oneof { Experiment experiment = 2; SessionStartInfo session_start_info = 3 } } Experiment        {
//! repeated HParamInfo hparam_infos = 4; repeated MetricInfo metric_infos = 5 } HParamInfo        { string
//! name = 1; DataType type = 4 }           DATA_TYPE_STRING = 1, _BOOL = 2, _FLOAT64 = 3 MetricInfo        {
//! MetricName name = 1 }                          MetricName { string group = 1; string tag = 2 }
//! SessionStartInfo  { map<string, Value> hparams = 1; double start_time_secs = 5 }     an entry { key = 1;
//! value = 2 } Value             { oneof { double number_value = 2; string string_value = 3; bool bool_value
//! = 4 } }
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

/// A hyperparameter's value.
#[derive(Clone, Debug, PartialEq)]
pub enum HParam {
    /// A number.
    Number(f64),
    /// True or false.
    Flag(bool),
    /// Any other value, as text.
    Text(String),
}

impl HParam {
    /// The value of a key of a configuration.
    pub fn from_toml(value: &toml::Value) -> Self {
        match value {
            toml::Value::Integer(number) => HParam::Number(*number as f64),
            toml::Value::Float(number) => HParam::Number(*number),
            toml::Value::Boolean(flag) => HParam::Flag(*flag),
            toml::Value::String(text) => HParam::Text(text.clone()),
            other => HParam::Text(other.to_string()),
        }
    }

    fn data_type(&self) -> u64 {
        match self {
            HParam::Text(_) => 1,
            HParam::Flag(_) => 2,
            HParam::Number(_) => 3,
        }
    }

    fn encoded(&self) -> Message {
        let mut value = Message::default();
        match self {
            HParam::Number(number) => value.double(2, *number),
            HParam::Text(text) => value.bytes(3, text.as_bytes()),
            HParam::Flag(flag) => value.varint(4, u64::from(*flag)),
        }
        value
    }
}

/// The event that declares hyperparameters, and the scalars to set them against.
pub fn hparams_experiment(wall_time: f64, hparams: &[(String, HParam)], metrics: &[&str]) -> Vec<u8> {
    let mut experiment = Message::default();
    for (name, value) in hparams {
        let mut info = Message::default();
        info.bytes(1, name.as_bytes());
        info.varint(4, value.data_type());
        experiment.bytes(4, &info.0);
    }
    for tag in metrics {
        let (mut name, mut info) = (Message::default(), Message::default());
        name.bytes(2, tag.as_bytes());
        info.bytes(1, &name.0);
        experiment.bytes(5, &info.0);
    }
    of_hparams(wall_time, "_hparams_/experiment", 2, &experiment)
}

/// The event that gives the values of a run's hyperparameters.
pub fn hparams_start(wall_time: f64, hparams: &[(String, HParam)]) -> Vec<u8> {
    let mut start = Message::default();
    for (name, value) in hparams {
        let mut entry = Message::default();
        entry.bytes(1, name.as_bytes());
        entry.bytes(2, &value.encoded().0);
        start.bytes(1, &entry.0);
    }
    start.double(5, wall_time);
    of_hparams(wall_time, "_hparams_/session_start_info", 3, &start)
}

/// An event for the plugin "hparams", whose message goes into this field of its plugin data.
fn of_hparams(wall_time: f64, tag: &str, field: u32, message: &Message) -> Vec<u8> {
    let mut content = Message::default();
    content.bytes(field, &message.0);
    let mut plugin = Message::default();
    plugin.bytes(1, b"hparams");
    plugin.bytes(2, &content.0);
    let mut metadata = Message::default();
    metadata.bytes(1, &plugin.0);
    let mut value = Message::default();
    value.bytes(VALUE_TAG, tag.as_bytes());
    value.bytes(VALUE_METADATA, &metadata.0);
    let mut summary = Message::default();
    summary.bytes(SUMMARY_VALUE, &value.0);
    summary_event(wall_time, 0, &summary)
}

/// The step of an encoded event; `None` if the bytes are no message.
pub fn step_of(event: &[u8]) -> Option<u64> {
    let mut step = 0;
    let mut rest = event;
    while !rest.is_empty() {
        if let (EVENT_STEP, ProtoField::Varint(value)) = take_field(&mut rest)? {
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
enum ProtoField<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    Fixed,
}

/// The first field of a message that has this number and holds bytes.
fn bytes_in(message: &[u8], number: u32) -> Option<&[u8]> {
    let mut rest = message;
    loop {
        match take_field(&mut rest)? {
            (found, ProtoField::Bytes(bytes)) if found == number => return Some(bytes),
            _ => {}
        }
    }
}

/// The next field of a message: its number and its value.
fn take_field<'a>(rest: &mut &'a [u8]) -> Option<(u32, ProtoField<'a>)> {
    let key = take_varint(rest)?;
    let number = u32::try_from(key >> 3).ok()?;
    let fixed = |length: usize| (length, None);
    let (length, field) = match key & 7 {
        0 => (0, Some(ProtoField::Varint(take_varint(rest)?))),
        1 => fixed(8),
        2 => {
            let length = usize::try_from(take_varint(rest)?).ok()?;
            (length, Some(ProtoField::Bytes(rest.get(..length)?)))
        }
        5 => fixed(4),
        _ => return None,
    };
    *rest = rest.get(length..)?;
    Some((number, field.unwrap_or(ProtoField::Fixed)))
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
