"""Reading of answers: which part of a model's text is thoughts, which a call of a function, and which the answer.

`families` lists the formats of model families, one module each.
"""
