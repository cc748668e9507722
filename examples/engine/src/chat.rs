//! Turns of a conversation, written the way the model was taught to read them.
//!
//! Two forms are known: ChatML (`<|im_start|>role … <|im_end|>`), recognised by the model's own template, and plain
//! text for a model without a template. A turn is text to append to what the sequence already holds, so that a kept
//! sequence computes only the new part.

use crate::{error::LoadError, gguf::GgufFile};

/// How a model wants its conversation written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatFormat {
    /// Roles between `<|im_start|>` and `<|im_end|>`.
    ChatMl {
        /// What the template puts in front when the user gives no system message.
        system: Option<String>,
    },
    /// The user's words as they are, one turn a line.
    Plain,
}

impl ChatFormat {
    /// Recognises the template of `file`.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for a template of another form.
    pub fn read(file: &GgufFile) -> Result<Self, LoadError> {
        if file.value("tokenizer.chat_template").is_none() {
            return Ok(Self::Plain);
        }
        Self::recognise(file.string("tokenizer.chat_template")?)
    }

    fn recognise(template: &str) -> Result<Self, LoadError> {
        if !template.contains("<|im_start|>") || !template.contains("<|im_end|>") {
            return Err(LoadError::Unsupported { what: "a chat template other than ChatML".to_owned() });
        }
        Ok(Self::ChatMl { system: default_system(template).map(str::to_owned) })
    }

    /// The text of the user's first turn, up to where the model begins to answer.
    pub fn first_turn(&self, words: &str) -> String {
        match self {
            Self::ChatMl { system: Some(system) } => format!("{}{}", chat_ml("system", system), ask(words)),
            Self::ChatMl { system: None } => ask(words),
            Self::Plain => format!("{words}\n"),
        }
    }

    /// The text of a later turn. `answer_ended` says that the last answer's end-of-turn token is already part of the
    /// sequence; an answer that was cut off gets it here.
    pub fn next_turn(&self, words: &str, answer_ended: bool) -> String {
        match self {
            Self::ChatMl { .. } => {
                format!("{}\n{}", if answer_ended { "" } else { "<|im_end|>" }, ask(words))
            }
            Self::Plain => format!("\n{words}\n"),
        }
    }
}

fn chat_ml(role: &str, words: &str) -> String {
    format!("<|im_start|>{role}\n{words}<|im_end|>\n")
}

fn ask(words: &str) -> String {
    chat_ml("user", words) + "<|im_start|>assistant\n"
}

/// The literal system message of a template, if it has one: what stands between the role and the end mark, unless
/// that is an expression.
fn default_system(template: &str) -> Option<&str> {
    let (_, rest) = template.split_once("<|im_start|>system\n")?;
    let (system, _) = rest.split_once("<|im_end|>")?;
    (!system.contains(['{', '\''])).then_some(system)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEMPLATE: &str = "{% if first %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}\
                            {{'<|im_start|>' + role + '\n' + content + '<|im_end|>' + '\n'}}";

    #[test]
    fn chat_ml_turns_join_into_one_conversation() {
        let format = ChatFormat::recognise(TEMPLATE).expect("this is ChatML");
        let asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(format.first_turn("Hi"), format!("<|im_start|>system\nYou help.<|im_end|>\n{asked}"));
        assert_eq!(format.next_turn("Hi", true), format!("\n{asked}"));
        assert_eq!(format.next_turn("Hi", false), format!("<|im_end|>\n{asked}"));
    }

    #[test]
    fn other_templates_are_refused_and_none_is_plain_text() {
        assert!(ChatFormat::recognise("[INST] {{ content }} [/INST]").is_err());
        assert_eq!(ChatFormat::Plain.first_turn("Hi"), "Hi\n");
    }
}
