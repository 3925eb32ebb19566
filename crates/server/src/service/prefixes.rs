//! The gateway's prefix names, from characters of the canonical text to tokens of the prompt.

use kwire_engine::PrefixTag;
use kwire_protocol::prefix::Segment;
use kwire_protocol::resume::PrefixName;

use crate::text::Tokenizer;
use crate::text::tokenizer::TokenizerError;

/// The tokens of a prompt whose text is `text`, and tags for the `names` in it.
pub fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    add_special: bool,
    segments: &[Segment<'_>],
    names: &[PrefixName],
) -> Result<(Vec<u32>, Vec<PrefixTag>), TokenizerError> {
    if names.is_empty() {
        return Ok((tokenizer.encode(text, add_special)?, Vec::new()));
    }
    let (tokens, ends) = tokenizer.encode_with_ends(text, add_special)?;
    Ok((tokens, tags(segments, names, text, &ends)))
}

/// Tags for a prompt whose text is `prompt`, with `ends` the byte where each token's text ends.
///
/// Each content is looked for in the prompt after the one before it, since the template decides what stands between. A
/// name that ends in a frame ends with the content before; at the first content that the template changed beyond its
/// outer white space, the rest is given up: tags are hints for routing, not truths to rely on.
fn tags(segments: &[Segment<'_>], names: &[PrefixName], prompt: &str, ends: &[usize]) -> Vec<PrefixTag> {
    let mut tags = Vec::with_capacity(names.len());
    let mut names = names.iter().peekable();
    let (mut chars, mut byte) = (0, 0);
    for segment in segments {
        let text = segment.text();
        let n_chars = text.chars().count();
        let content = match segment {
            Segment::Content(_) => {
                let trimmed = text.trim();
                let Some(at) = prompt[byte..].find(trimmed) else { break };
                // Where the content would begin, had it not been trimmed.
                Some((byte + at, text.len() - text.trim_start().len(), trimmed.len()))
            }
            Segment::Frame(_) => None,
        };
        while let Some(name) = names.next_if(|name| name.end <= chars + n_chars) {
            let end_byte = match content {
                Some((begin, lead, length)) => {
                    let within = text.char_indices().nth(name.end.saturating_sub(chars)).map_or(text.len(), |(i, _)| i);
                    begin + within.saturating_sub(lead).min(length)
                }
                None => byte,
            };
            push(&mut tags, name.id, end_byte, ends);
        }
        if let Some((begin, _, length)) = content {
            byte = begin + length;
        }
        chars += n_chars;
    }
    tags
}

/// Tags the last token that lies wholly in the first `end_byte` bytes.
fn push(tags: &mut Vec<PrefixTag>, id: u64, end_byte: usize, ends: &[usize]) {
    let end_token = ends.partition_point(|&end| end <= end_byte);
    if end_token > 0 {
        tags.push(PrefixTag { id, end_token });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_behind_the_template() {
        let segments = [
            Segment::Frame("user"),
            Segment::Frame("\n"),
            Segment::Content(" hello world "),
            Segment::Frame("\n"),
            Segment::Frame("assistant"),
            Segment::Frame("\n"),
            Segment::Content("yes"),
        ];
        let prompt = "<u>hello world</u><a>yes";
        let ends: Vec<usize> = (1..=prompt.len()).collect(); // a token per byte
        let names = [(1, 4), (2, 11), (3, 18), (4, 20), (5, 32)].map(|(id, end)| PrefixName { id, end });
        let got: Vec<(u64, usize)> =
            tags(&segments, &names, prompt, &ends).iter().map(|tag| (tag.id, tag.end_token)).collect();
        assert_eq!(got, [(2, 8), (3, 14), (4, 14), (5, 24)]);
        let unordered = [(5, 32), (1, 12)].map(|(id, end)| PrefixName { id, end });
        assert_eq!(tags(&segments, &unordered, prompt, &ends).len(), 2, "a broken promise is no panic");
    }
}
