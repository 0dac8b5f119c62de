"""The Python files of wheels as a text for training: JSON lines, one for each file, without copies.

    pip download --no-deps --only-binary=:all: --python-version 3.12 sympy==1.14.0 django==5.2.8 scipy==1.16.3 \\
        sqlalchemy==2.0.44 networkx==3.5 scikit-learn==1.7.2
    python benches/code_corpus.py *.whl > code.jsonl
"""

import json
import random
import sys
import zipfile

texts = set()
for wheel in sys.argv[1:]:
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            text = files.read(name).decode("utf-8", "replace") if name.endswith(".py") else ""
            if 200 < len(text) < 200_000:
                texts.add(text)
texts = sorted(texts)
random.Random(0).shuffle(texts)
for text in texts:
    print(json.dumps({"text": text}))
