"""The tiny target as a GGUF file whose words a server can read and write, which the toolkit leaves to llama.cpp."""

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from modelopt_eagle.target.to_gguf import float32_gguf, write_out


def with_words(target, folder, path):
    """Write it.

    Args:
        target: the tiny target; folder: what it was loaded from.
        path: the file to make.
    """
    plain = path.with_name("plain.gguf")
    float32_gguf(target, folder, plain)
    reader, writer = GGUFReader(plain), GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "tokenizer.", "general.architecture")):
            entries = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], entries)
    tokenizer, size = target.tokenizer, target.vocab_size
    known = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    words = known + ["\u0100\u0100"] + [f"<{n}>" for n in range(len(known) + 1, size)]  # two null bytes: a merge
    special = set(tokenizer.all_special_ids)
    for key, value, kind, entries in (
        ("model", "gpt2", GGUFValueType.STRING, None),
        ("pre", "default", GGUFValueType.STRING, None),
        ("tokens", words, GGUFValueType.ARRAY, GGUFValueType.STRING),
        ("token_type", [3 if n in special else 1 for n in range(size)], GGUFValueType.ARRAY, GGUFValueType.INT32),
        ("merges", ["\u0100 \u0100"], GGUFValueType.ARRAY, GGUFValueType.STRING),
        ("bos_token_id", tokenizer.bos_token_id, GGUFValueType.UINT32, None),
        ("eos_token_id", tokenizer.eos_token_id, GGUFValueType.UINT32, None),
        ("padding_token_id", tokenizer.pad_token_id, GGUFValueType.UINT32, None),
        ("add_bos_token", False, GGUFValueType.BOOL, None),
        ("add_space_prefix", False, GGUFValueType.BOOL, None),
    ):
        writer.add_key_value(f"tokenizer.ggml.{key}", value, kind, entries)
    writer.add_chat_template(tokenizer.chat_template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    write_out(writer)
