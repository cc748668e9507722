//! Text to tokens and back, from the tables inside a GGUF file.
//!
//! Two kinds are known: byte-level BPE (`tokenizer.ggml.model` = `gpt2`: a text is cut by the pre-tokenizer that
//! `tokenizer.ggml.pre` names, its bytes are written as printable characters, and pairs are merged by rank), which
//! the `tokenizers` crate does; and `bytes`, where a token is a byte and 256 ends a text. Special tokens such as
//! `<|im_start|>` are recognised within a prompt's text.
//!
//! Decoding is done here, token by token into bytes: a character may be spread over several tokens, so text that is
//! shown as it is made goes through a [`TextStream`], which holds back bytes until they are whole characters.

use std::collections::BTreeSet;

use candle_core::quantized::gguf_file::Value;
use tokenizers::{
    AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior,
    models::bpe::{BPE, Vocab},
    pre_tokenizers::{
        byte_level::ByteLevel,
        digits::Digits,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

use crate::{
    error::LoadError,
    gguf::{GgufFile, bad_value},
};

/// Token that ends a text in a `bytes` vocabulary.
const BYTES_END: u32 = 256;

/// Texts that mark the end of an answer in the vocabularies of Llama-architecture models.
const END_TEXTS: [&str; 6] =
    ["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "</s>"];

/// How Llama 3 cuts a text before merging.
const LLAMA3_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A model's vocabulary, in both directions.
#[derive(Debug)]
pub struct Tokenizer {
    /// `None` for a vocabulary of bytes.
    encoder: Option<Box<tokenizers::Tokenizer>>,
    /// The bytes that each token stands for, by id.
    token_bytes: Vec<Box<[u8]>>,
    begin: Option<u32>,
    end_tokens: Vec<u32>,
}

impl Tokenizer {
    /// Builds the tokenizer that `file` describes.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for a kind that is not known here, [`LoadError::Tokenizer`] where its tables
    /// disagree, and the errors of a metadata lookup.
    pub fn read(file: &GgufFile) -> Result<Self, LoadError> {
        match file.string("tokenizer.ggml.model")? {
            "bytes" => Ok(Self::bytes(file.optional_u32("tokenizer.ggml.eos_token_id")?)),
            "gpt2" => Self::byte_level_bpe(file),
            other => Err(LoadError::Unsupported { what: format!("a tokenizer of kind {other:?}") }),
        }
    }

    fn bytes(end: Option<u32>) -> Self {
        let mut token_bytes: Vec<Box<[u8]>> = (0..=u8::MAX).map(|byte| Box::from([byte])).collect();
        token_bytes.push(Box::default());
        Self { encoder: None, token_bytes, begin: None, end_tokens: vec![end.unwrap_or(BYTES_END)] }
    }

    fn byte_level_bpe(file: &GgufFile) -> Result<Self, LoadError> {
        let tokens = file.strings("tokenizer.ggml.tokens")?;
        let special = special_tokens(file, tokens.len())?;
        let vocab: Vocab = tokens.iter().zip(0..).map(|(&text, id)| (text.to_owned(), id)).collect();
        let merges = file.strings("tokenizer.ggml.merges")?.into_iter().map(|merge| {
            // A merged part may itself contain no blank, so the first one separates the two.
            let (left, right) = merge.split_once(' ').ok_or(bad_value("tokenizer.ggml.merges", "pairs"))?;
            Ok((left.to_owned(), right.to_owned()))
        });
        let pre = file.string("tokenizer.ggml.pre").unwrap_or("default");
        let model = BPE::builder()
            .vocab_and_merges(vocab, merges.collect::<Result<Vec<_>, LoadError>>()?)
            .ignore_merges(pre == "llama-bpe")
            .build()
            .map_err(tokenizer_error)?;
        let mut encoder = tokenizers::Tokenizer::new(model);
        encoder.with_pre_tokenizer(Some(pre_tokenizer(pre)?));
        encoder
            .add_special_tokens(special.iter().map(|&id| AddedToken::from(tokens[id as usize], true)))
            .map_err(tokenizer_error)?;
        let token_bytes = tokens.iter().zip(0u32..).map(|(text, id)| {
            if special.contains(&id) {
                text.as_bytes().into()
            } else {
                text.chars().flat_map(char_bytes).collect()
            }
        });
        Ok(Self {
            encoder: Some(Box::new(encoder)),
            token_bytes: token_bytes.collect(),
            begin: begin_token(file, pre)?,
            end_tokens: end_tokens(file)?,
        })
    }

    /// The tokens of `text`, with the model's begin-of-text token in front if it asks for one and `at_start` holds.
    ///
    /// # Errors
    /// [`LoadError::Tokenizer`], should the tokenizer refuse the text.
    pub fn encode(&self, text: &str, at_start: bool) -> Result<Vec<u32>, LoadError> {
        let Some(encoder) = &self.encoder else { return Ok(text.bytes().map(u32::from).collect()) };
        let encoding = encoder.encode_fast(text, false).map_err(tokenizer_error)?;
        Ok(self.begin.filter(|_| at_start).iter().chain(encoding.get_ids()).copied().collect())
    }

    /// The text of `tokens`; special tokens appear by name, bytes that are no text as U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut stream = TextStream::default();
        let mut text: String = tokens.iter().map(|&token| stream.push(self.bytes_of(token))).collect();
        text += &stream.finish();
        text
    }

    /// The bytes that one token stands for; none for a token outside the vocabulary.
    pub fn bytes_of(&self, token: u32) -> &[u8] {
        self.token_bytes.get(token as usize).map_or(&[], |bytes| bytes)
    }

    /// The tokens after which a sequence ends, the one that the file names first.
    pub fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }
}

/// Turns the bytes of a sequence's tokens into text, whole characters only.
#[derive(Clone, Debug, Default)]
pub struct TextStream {
    pending: Vec<u8>,
}

impl TextStream {
    /// Takes a token's bytes and returns the characters that are whole by now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(rest) => {
                    text += rest;
                    self.pending.clear();
                    return text;
                }
                Err(error) => {
                    let (valid, rest) = self.pending.split_at(error.valid_up_to());
                    text += &String::from_utf8_lossy(valid);
                    // Without a length the rest may still become a character; otherwise it never will.
                    let Some(broken) = error.error_len() else {
                        self.pending = rest.to_vec();
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.pending = rest[broken..].to_vec();
                }
            }
        }
    }

    /// Ends the text: a character that was begun and not completed is shown as U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

fn pre_tokenizer(name: &str) -> Result<PreTokenizerWrapper, LoadError> {
    let cut_and_spell = ByteLevel::new(false, false, true);
    match name {
        "default" | "gpt-2" | "gpt2" => Ok(cut_and_spell.into()),
        "smollm" => Ok(Sequence::new(vec![Digits::new(true).into(), cut_and_spell.into()]).into()),
        "llama-bpe" | "llama3" => {
            let pattern = SplitPattern::Regex(LLAMA3_PATTERN.to_owned());
            let split =
                Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(tokenizer_error)?;
            let spell = ByteLevel::new(false, false, false);
            Ok(Sequence::new(vec![split.into(), spell.into()]).into())
        }
        other => Err(LoadError::Unsupported { what: format!("the pre-tokenizer {other:?}") }),
    }
}

/// Ids of the control and user-defined tokens, whose texts stand for themselves.
fn special_tokens(file: &GgufFile, vocab_len: usize) -> Result<BTreeSet<u32>, LoadError> {
    const KEY: &str = "tokenizer.ggml.token_type";
    let Some(value) = file.value(KEY) else { return Ok(BTreeSet::new()) };
    let Value::Array(types) = value else { return Err(bad_value(KEY, "a list of numbers")) };
    if types.len() != vocab_len {
        return Err(bad_value(KEY, "as long as the list of tokens"));
    }
    let is_special = |value: &Value| matches!(value, Value::I32(3 | 4) | Value::U32(3 | 4));
    Ok(types.iter().zip(0..).filter(|(value, _)| is_special(value)).map(|(_, id)| id).collect())
}

fn begin_token(file: &GgufFile, pre: &str) -> Result<Option<u32>, LoadError> {
    let wanted = match file.value("tokenizer.ggml.add_bos_token") {
        Some(Value::Bool(wanted)) => *wanted,
        Some(_) => return Err(bad_value("tokenizer.ggml.add_bos_token", "true or false")),
        None => matches!(pre, "llama-bpe" | "llama3"),
    };
    if wanted { file.optional_u32("tokenizer.ggml.bos_token_id") } else { Ok(None) }
}

/// The tokens after which a sequence ends, the one that the file names first; they need no tokenizer that is known
/// here.
///
/// # Errors
/// [`LoadError::BadValue`].
pub fn end_tokens(file: &GgufFile) -> Result<Vec<u32>, LoadError> {
    let mut ends = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        ends.extend(file.optional_u32(key)?);
    }
    if file.value("tokenizer.ggml.tokens").is_some() {
        let tokens = file.strings("tokenizer.ggml.tokens")?;
        ends.extend(tokens.iter().zip(0u32..).filter(|(text, _)| END_TEXTS.contains(text)).map(|(_, id)| id));
    }
    let mut seen = BTreeSet::new();
    ends.retain(|&id| seen.insert(id));
    Ok(ends)
}

fn tokenizer_error(error: tokenizers::Error) -> LoadError {
    LoadError::Tokenizer { reason: error.to_string().lines().next().unwrap_or_default().to_owned() }
}

/// The bytes that a character of a byte-level vocabulary spells: GPT-2 writes printable Latin-1 as itself, and the
/// other bytes, in order, as the characters from U+0100 on. Anything else stands for its own UTF-8.
fn char_bytes(character: char) -> Vec<u8> {
    let is_printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    match character as u32 {
        code if is_printable(code) => vec![code as u8],
        code @ 0x100..=0x143 => {
            let index = (code - 0x100) as usize;
            (0..=u8::MAX).filter(|&byte| !is_printable(byte.into())).nth(index).into_iter().collect()
        }
        _ => character.to_string().into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_spelled_by_one_character_of_a_byte_level_vocabulary() {
        let spelled: BTreeSet<u8> =
            ('!'..='\u{143}').map(char_bytes).filter(|bytes| bytes.len() == 1).map(|b| b[0]).collect();
        assert_eq!(spelled.len(), 256);
        assert_eq!(char_bytes('\u{120}'), b" ");
        assert_eq!(char_bytes('\u{10a}'), b"\n");
    }

    #[test]
    fn a_stream_never_shows_part_of_a_character() {
        let mut stream = TextStream::default();
        let shown: Vec<String> = "a\u{20ac}b".bytes().map(|byte| stream.push(&[byte])).collect();
        assert_eq!(shown, ["a", "", "", "\u{20ac}", "b"]);
        assert_eq!(stream.push(&[0xe2, 0x82]), "");
        assert_eq!(stream.push(b"x"), "\u{fffd}x");
        assert_eq!(stream.push(&[0xc3]), "");
        assert_eq!(stream.finish(), "\u{fffd}");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn a_byte_vocabulary_is_its_own_tokenizer() {
        let tokenizer = Tokenizer::bytes(None);
        let tokens = tokenizer.encode("h\u{e9}", true).expect("bytes are always tokens");
        assert_eq!(tokens, [104, 195, 169]);
        assert_eq!(tokenizer.decode(&[104, 195, 169, 256]), "h\u{e9}");
        assert_eq!(tokenizer.end_tokens(), [256]);
    }
}
