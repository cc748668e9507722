//! Lines of assembly, those that the disassembler misread read again.
//!
//! RADV shows what LLVM reads in the code. LLVM refuses scalar loads into s[104:107], which RADV uses, as one invalid
//! word and goes on with their second word as if it were an instruction, until it falls into step again by chance. The
//! words stand behind every line, and the rest of the text tells which opcode has which name: from an invalid word on,
//! words are gathered and named anew until an instruction ends where a line does.

use std::collections::HashMap;

use crate::Failure;

/// A line of the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line<'a> {
    Label(u32),
    Instruction {
        mnemonic: &'a str,
        operands: &'a str,
        words: Vec<u32>,
    },
    /// What the disassembler did not understand.
    Invalid {
        words: Vec<u32>,
    },
}

/// The lines of `text`, none of them invalid.
///
/// # Errors
/// When a line is not understood, or an invalid instruction has an opcode that the text has nowhere else.
pub(super) fn lines(text: &str) -> Result<Vec<Line<'_>>, Failure> {
    let lines =
        text.lines().filter(|line| !line.trim().is_empty()).map(line).collect::<Result<Vec<_>, _>>()?;
    let mut names = HashMap::new();
    for line in &lines {
        if let Line::Instruction { mnemonic, words, .. } = line {
            names.insert(opcode(words[0]), *mnemonic);
        }
    }
    let mut result = Vec::new();
    let mut lines = lines.into_iter();
    while let Some(line) = lines.next() {
        match line {
            Line::Invalid { words } => read_again(words, &mut lines, &names, &mut result)?,
            line => result.push(line),
        }
    }
    Ok(result)
}

fn line(text: &str) -> Result<Line<'_>, Failure> {
    let not_understood = || format!("not understood: `{text}`");
    if let Some(label) = text.strip_prefix("BB") {
        return Ok(Line::Label(label.trim_end().strip_suffix(':').ok_or_else(not_understood)?.parse()?));
    }
    let (code, words) = text.rsplit_once(';').ok_or_else(not_understood)?;
    let words = words.split_whitespace().map(|word| u32::from_str_radix(word, 16));
    let words = words.collect::<Result<Vec<_>, _>>().map_err(|_| not_understood())?;
    if words.is_empty() {
        return Err(not_understood().into());
    }
    if code.starts_with("(invalid instruction)") {
        return Ok(Line::Invalid { words });
    }
    let code = code.strip_prefix('\t').ok_or_else(not_understood)?.trim_end();
    let (mnemonic, operands) = code.split_once(' ').unwrap_or((code, ""));
    Ok(Line::Instruction { mnemonic, operands, words })
}

/// Reads instructions from `words` and the lines behind them until one ends with a line.
fn read_again<'a>(
    mut words: Vec<u32>,
    lines: &mut impl Iterator<Item = Line<'a>>,
    names: &HashMap<u32, &'a str>,
    result: &mut Vec<Line<'a>>,
) -> Result<(), Failure> {
    while let Some(&first) = words.first() {
        let name = names.get(&opcode(first)).copied();
        let mnemonic = name.ok_or_else(|| format!("{first:08x}: an opcode without a name"))?;
        if mnemonic.contains("branch") {
            return Err(format!("{first:08x}: a branch without a target").into());
        }
        let mut len = len(mnemonic, &words);
        while words.len() < len {
            match lines.next() {
                Some(Line::Instruction { words: more, .. } | Line::Invalid { words: more }) => {
                    words.extend(more)
                }
                _ => return Err(format!("{first:08x}: misread up to a label").into()),
            }
            // Only the second word tells whether some have a third.
            len = self::len(mnemonic, &words);
        }
        let rest = words.split_off(len);
        result.push(Line::Instruction { mnemonic, operands: "", words });
        words = rest;
    }
    Ok(())
}

/// How RDNA's encodings begin, in the six highest bits of the first word. AMD, "RDNA3 instruction set architecture".
mod encoding {
    pub(super) const VOP3P: u32 = 0b110011;
    pub(super) const VOP3: u32 = 0b110101;
    pub(super) const DS: u32 = 0b110110;
    pub(super) const MUBUF: u32 = 0b111000;
    pub(super) const SMEM: u32 = 0b111101;
}

/// The bits of an instruction's first word that tell what it is.
fn opcode(word: u32) -> u32 {
    let mask = match word >> 26 {
        encoding::VOP3 | encoding::VOP3P => 0xffff_0000,
        encoding::DS | encoding::MUBUF | encoding::SMEM => 0xfffc_0000,
        // One source: its opcode lies lower.
        _ if word >> 25 == 0b011_1111 => 0xfe01_fe00,
        _ if word >> 25 == 0b011_1110 => 0xfffe_0000,
        _ if word >> 31 == 0 => 0xfe00_0000,
        _ if word >> 23 == 0b1_0111_1101 => 0xff80_ff00,
        _ if word >> 23 == 0b1_0111_1110 || word >> 23 == 0b1_0111_1111 => 0xffff_0000,
        _ if word >> 30 == 0b10 => 0xff80_0000,
        _ => u32::MAX,
    };
    word & mask
}

/// Words of the instruction that `words` begin with; where the second word is needed to tell and not there, too few.
fn len(mnemonic: &str, words: &[u32]) -> usize {
    /// A source that is a literal behind the instruction.
    const LITERAL: u32 = 0xff;
    /// Sources that are described by one more word: DPP8, SDWA, DPP.
    const DESCRIBED: [u32; 4] = [0xe9, 0xea, 0xf9, 0xfa];
    let first = words[0];
    let more = match first >> 26 {
        encoding::VOP3 | encoding::VOP3P => {
            let sources =
                words.get(1).map_or([0; 3], |word| [word & 0x1ff, word >> 9 & 0x1ff, word >> 18 & 0x1ff]);
            return 2 + usize::from(sources.contains(&LITERAL));
        }
        encoding::DS | encoding::MUBUF | encoding::SMEM => true,
        _ if first >> 31 == 0 => {
            let source = first & 0x1ff;
            source == LITERAL
                || DESCRIBED.contains(&source)
                || mnemonic.starts_with("v_fmaak")
                || mnemonic.starts_with("v_fmamk")
        }
        // Without sources: SOPK and SOPP.
        _ if first >> 28 == 0b1011 && !(0b1_0111_1101..=0b1_0111_1110).contains(&(first >> 23)) => false,
        _ if first >> 23 == 0b1_0111_1101 => first & 0xff == LITERAL,
        _ => first & 0xff == LITERAL || first >> 8 & 0xff == LITERAL,
    };
    1 + usize::from(more)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mnemonics(text: &str) -> Vec<&str> {
        let name = |line| match line {
            Line::Instruction { mnemonic, .. } => mnemonic,
            other => panic!("{other:?}"),
        };
        lines(text).expect("a text that can be read").into_iter().map(name).collect()
    }

    const KNOWN: &str = "\ts_buffer_load_b128 s[44:47], s[40:43], s14    ; f4280b14 1c000000\n\
                         \tv_fma_mix_f32 v77, s44, v52, neg(0) ; cc20004d 9202682c\n\
                         \ts_waitcnt vmcnt(5)  ; bf8917f7\n";

    #[test]
    fn the_second_word_of_an_invalid_load_is_no_instruction() {
        let text = format!(
            "{KNOWN}(invalid instruction)  ; f4281a14\n\tv_lshlrev_b32_e32 v0, s48, v0  ; 30000030\n\ts_waitcnt vmcnt(4) ; bf8913f7\n"
        );
        assert_eq!(
            mnemonics(&text),
            ["s_buffer_load_b128", "v_fma_mix_f32", "s_waitcnt", "s_buffer_load_b128", "s_waitcnt"]
        );
    }

    #[test]
    fn instructions_that_were_swallowed_are_named_again() {
        let text = format!(
            "{KNOWN}(invalid instruction)  ; f4281a14\n\tv_fmaak_f32 v0, 1.0, v0, 0xcc20004d ; 5a0000f2 cc20004d\n\
             (invalid instruction) ; 9202682c\n\ts_waitcnt vmcnt(4) ; bf8913f7\n"
        );
        assert_eq!(mnemonics(&text)[3..], ["s_buffer_load_b128", "v_fma_mix_f32", "s_waitcnt"]);
    }

    #[test]
    fn what_cannot_be_named_is_refused() {
        for wrong in [
            "(invalid instruction)  ; d8d80800\n\ts_waitcnt vmcnt(4) ; bf8913f7\n",
            "(invalid instruction)  ; f4281a14\nBB7:\n\ts_waitcnt vmcnt(4) ; bf8913f7\n",
            "(invalid instruction)  ; f4281a14\n",
        ] {
            assert!(lines(&format!("{KNOWN}{wrong}")).is_err(), "{wrong}");
        }
    }
}
