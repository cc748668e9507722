//! A GGUF file, opened: its metadata, and its tensors as f32 on request.
//!
//! Reading is done by `candle-core`, which knows GGUF's header and its quantised block types. This module adds what
//! a program owes its user: the file is checked as a whole before the first tensor is read (so that a truncated
//! download is refused at once, with both sizes), every lookup fails with the key's or tensor's name, and shapes
//! are compared with what the metadata promises.
//!
//! Tensors are dequantised one by one, when asked for: a device that copies them away never holds the model twice.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, BufReader, Cursor, Read, Seek, SeekFrom},
    path::Path,
};

use candle_core::{
    Device,
    quantized::gguf_file::{Content, Value},
};

use crate::error::LoadError;

trait Source: Read + Seek + Send {}
impl<T: Read + Seek + Send> Source for T {}

/// An opened GGUF file whose header has been read and checked.
pub struct GgufFile {
    name: String,
    content: Content,
    source: Box<dyn Source>,
    taken: BTreeSet<String>,
}

impl GgufFile {
    /// Opens `path` and reads its header.
    ///
    /// # Errors
    /// [`LoadError::Io`], [`LoadError::NotGguf`], [`LoadError::Truncated`] and [`LoadError::Malformed`].
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let name = path.display().to_string();
        // Some systems open folders, others refuse them for other reasons.
        let file = match path.is_dir() {
            true => Err(io::Error::from(io::ErrorKind::IsADirectory)),
            false => File::open(path),
        };
        match file {
            Ok(file) => Self::read(name, Box::new(BufReader::new(file))),
            Err(source) => Err(LoadError::Io { file: name, source }),
        }
    }

    /// Reads the header of a file that is compiled into the program; `name` stands for it in messages.
    ///
    /// # Errors
    /// As [`GgufFile::open`].
    pub fn from_bytes(name: &str, bytes: &'static [u8]) -> Result<Self, LoadError> {
        Self::read(name.to_owned(), Box::new(Cursor::new(bytes)))
    }

    fn read(name: String, mut source: Box<dyn Source>) -> Result<Self, LoadError> {
        let io_error = |source| LoadError::Io { file: name.clone(), source };
        let actual_bytes = source.seek(SeekFrom::End(0)).map_err(io_error)?;
        source.rewind().map_err(io_error)?;
        let mut magic = [0; 4];
        if source.read_exact(&mut magic).is_err() || &magic != b"GGUF" {
            return Err(LoadError::NotGguf { file: name });
        }
        source.rewind().map_err(io_error)?;
        let content = match Content::read(&mut source) {
            Ok(content) => content,
            Err(error) if ends_early(&error) => {
                return Err(LoadError::Truncated { file: name, needed_bytes: None, actual_bytes });
            }
            Err(source) => return Err(LoadError::Malformed { file: name, source }),
        };
        let file = Self { name, content, source, taken: BTreeSet::new() };
        let ends = file.content.tensor_infos.values().map(|info| file.tensor_end(info).unwrap_or(u64::MAX));
        match ends.max() {
            Some(needed) if needed > actual_bytes => {
                Err(LoadError::Truncated { file: file.name, needed_bytes: Some(needed), actual_bytes })
            }
            _ => Ok(file),
        }
    }

    /// First byte after a tensor, counted from the start of the file; `None` if that is beyond any file.
    fn tensor_end(&self, info: &candle_core::quantized::gguf_file::TensorInfo) -> Option<u64> {
        let elements =
            info.shape.dims().iter().try_fold(1u64, |product, &dim| product.checked_mul(dim as u64))?;
        let blocks = elements.div_ceil(info.ggml_dtype.block_size() as u64);
        let bytes = blocks.checked_mul(info.ggml_dtype.type_size() as u64)?;
        self.content.tensor_data_offset.checked_add(info.offset)?.checked_add(bytes)
    }

    /// Bytes of tensor data in the file, for a progress bar.
    pub fn tensor_bytes(&self) -> u64 {
        self.content.tensor_infos.keys().map(|name| self.bytes_of(name)).sum()
    }

    /// Bytes that one tensor has in the file; 0 if there is no such tensor.
    pub fn bytes_of(&self, tensor: &str) -> u64 {
        let Some(info) = self.content.tensor_infos.get(tensor) else { return 0 };
        let blocks = info.shape.elem_count().div_ceil(info.ggml_dtype.block_size());
        (blocks * info.ggml_dtype.type_size()) as u64
    }

    /// Whether the file has a tensor of this name.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    /// One tensor as f32, row-major, its shape checked: `[rows, columns]` or `[length]`.
    ///
    /// # Errors
    /// [`LoadError::MissingTensor`], [`LoadError::WrongShape`], and [`LoadError::Malformed`] where its type is
    /// unknown.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let Some(info) = self.content.tensor_infos.get(name) else {
            return Err(LoadError::MissingTensor { name: name.to_owned() });
        };
        if info.shape.dims() != shape {
            return Err(LoadError::WrongShape {
                name: name.to_owned(),
                expected: shape.to_vec(),
                found: info.shape.dims().to_vec(),
            });
        }
        self.taken.insert(name.to_owned());
        self.content
            .tensor(&mut self.source, name, &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1())
            .map_err(|source| LoadError::Malformed { file: self.name.clone(), source })
    }

    /// Refuses a file with tensors that were not asked for: a bias or an expert that is left out makes a model that
    /// talks nonsense without saying why.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] with the first such tensor's name.
    pub fn check_all_taken(&self) -> Result<(), LoadError> {
        let names: BTreeSet<&String> = self.content.tensor_infos.keys().collect();
        match names.into_iter().find(|name| !self.taken.contains(*name)) {
            Some(name) => Err(LoadError::Unsupported { what: format!("the tensor {}", name.escape_debug()) }),
            None => Ok(()),
        }
    }

    /// A metadata value, if the file has it.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(key)
    }

    /// A metadata string.
    ///
    /// # Errors
    /// [`LoadError::MissingKey`] or [`LoadError::BadValue`].
    pub fn string(&self, key: &str) -> Result<&str, LoadError> {
        match self.required(key)? {
            Value::String(text) => Ok(text),
            _ => Err(bad_value(key, "a text")),
        }
    }

    /// A metadata number that must be present and fit into 32 bits.
    ///
    /// # Errors
    /// [`LoadError::MissingKey`] or [`LoadError::BadValue`].
    pub fn u32(&self, key: &str) -> Result<u32, LoadError> {
        to_u32(key, self.required(key)?)
    }

    /// A metadata number, or `None` where the file does not have it.
    ///
    /// # Errors
    /// [`LoadError::BadValue`] if it is there and is not a number.
    pub fn optional_u32(&self, key: &str) -> Result<Option<u32>, LoadError> {
        self.value(key).map(|value| to_u32(key, value)).transpose()
    }

    /// A metadata fraction that must be present.
    ///
    /// # Errors
    /// [`LoadError::MissingKey`] or [`LoadError::BadValue`].
    pub fn f32(&self, key: &str) -> Result<f32, LoadError> {
        match self.required(key)? {
            Value::F32(value) => Ok(*value),
            Value::F64(value) => Ok(*value as f32),
            _ => Err(bad_value(key, "a fraction")),
        }
    }

    /// A metadata array of strings.
    ///
    /// # Errors
    /// [`LoadError::MissingKey`] or [`LoadError::BadValue`].
    pub fn strings(&self, key: &str) -> Result<Vec<&str>, LoadError> {
        let Value::Array(values) = self.required(key)? else { return Err(bad_value(key, "a list of texts")) };
        let texts = values.iter().map(|value| match value {
            Value::String(text) => Ok(text.as_str()),
            _ => Err(bad_value(key, "a list of texts")),
        });
        texts.collect()
    }

    fn required(&self, key: &str) -> Result<&Value, LoadError> {
        self.value(key).ok_or_else(|| LoadError::MissingKey { key: key.to_owned() })
    }
}

impl std::fmt::Debug for GgufFile {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("GgufFile").field("name", &self.name).finish_non_exhaustive()
    }
}

fn to_u32(key: &str, value: &Value) -> Result<u32, LoadError> {
    let number = match *value {
        Value::I8(number) => u32::try_from(number).ok(),
        Value::I16(number) => u32::try_from(number).ok(),
        Value::I32(number) => u32::try_from(number).ok(),
        Value::I64(number) => u32::try_from(number).ok(),
        Value::U8(number) => Some(u32::from(number)),
        Value::U16(number) => Some(u32::from(number)),
        Value::U32(number) => Some(number),
        Value::U64(number) => u32::try_from(number).ok(),
        _ => None,
    };
    number.ok_or_else(|| bad_value(key, "a whole number of 32 bits"))
}

/// A [`LoadError::BadValue`].
pub(crate) fn bad_value(key: &str, expected: &'static str) -> LoadError {
    LoadError::BadValue { key: key.to_owned(), expected }
}

/// Whether the reader stopped because the file did: either it met the end, or a length that it read is larger than
/// what is left.
fn ends_early(error: &candle_core::Error) -> bool {
    match error {
        candle_core::Error::Io(error) => error.kind() == io::ErrorKind::UnexpectedEof,
        candle_core::Error::WithBacktrace { inner, .. } => ends_early(inner),
        other => other.to_string().contains("remaining"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::Synthetic;

    fn error_of(bytes: &'static [u8]) -> String {
        GgufFile::from_bytes("m.gguf", bytes).expect_err("the file is broken").to_string()
    }

    #[test]
    fn a_file_that_ends_early_is_refused_before_any_tensor_is_read() {
        let bytes = Synthetic::new(true).bytes();
        let [needed, half] = [bytes.len(), bytes.len() / 2];
        assert_eq!(
            error_of(&bytes[..half]),
            format!("m.gguf is truncated: its header describes {needed} bytes, the file has {half}")
        );
        for len in [4, 10, 30, 300, 900] {
            let expected = format!("m.gguf is truncated: it ends within its header, after {len} bytes");
            assert_eq!(error_of(&bytes[..len]), expected);
        }
        assert_eq!(error_of(b"not a model"), "m.gguf is not a GGUF file");
        assert_eq!(error_of(b""), "m.gguf is not a GGUF file");
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = GgufFile::open(Path::new("/no/such/file")).expect_err("it is not there");
        assert!(error.to_string().starts_with("cannot read /no/such/file: "), "{error}");
    }

    #[test]
    fn tensors_are_checked_by_name_and_shape() {
        let mut file = Synthetic::new(true).open();
        let error = |result: Result<Vec<f32>, LoadError>| result.expect_err("it is refused").to_string();
        assert_eq!(error(file.tensor("x", &[1])), "the model has no tensor x");
        assert_eq!(
            error(file.tensor("output_norm.weight", &[41])),
            "the model's tensor output_norm.weight has shape [40], its metadata asks for [41]"
        );
        assert_eq!(file.tensor("output_norm.weight", &[40]).map(|values| values.len()).ok(), Some(40));
        assert_eq!(
            file.check_all_taken().expect_err("others are left").to_string(),
            "the model needs the tensor blk.0.attn_k.weight, which is not supported"
        );
    }
}
