"""conf_keys.py TEMPLATE CONF: the template with @KEYS@ replaced by the sections and keys of conf/spillway.conf, as scdoc."""
import re
import sys
from pathlib import Path


def escape(text):
    return re.sub(r"([_*\\])", r"\\\1", text)


def keys(conf):
    lines, comment = [], []
    for line in conf.splitlines():
        setting = re.fullmatch(r"#?(\w+) =(.*)", line)
        section = re.fullmatch(r"\[(\w+)\]", line)
        if section:
            lines += ["", f"# {section[1].upper()}", "", f"Keys of the section _[{section[1]}]_."]
        elif setting and comment:
            *reason, unit = comment
            marks = ", _reload_" if unit.startswith("* ") else ""
            value = f" = {escape(setting[2].strip())}" if setting[2].strip() else ""
            lines += ["", f"*{escape(setting[1])}*{value}{marks}", *(f"\t{escape(part)}" for part in reason), "",
                      f"\t_{escape(unit.removeprefix('* '))}_"]
        if line.startswith("# "):
            comment.append(line[2:])
        else:
            comment = []
    return "\n".join(lines)


template, conf = (Path(path).read_text() for path in sys.argv[1:])
print(template.replace("@KEYS@", keys(conf)), end="")
