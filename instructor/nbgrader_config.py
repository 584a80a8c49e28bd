"""nbgrader's configuration for reading written answers; `labkit grade --out OUT --manual` copies it to OUT/nbgrader.

Scores of code, numbers and choices come from `labkit grade`; nbgrader is the place where a person reads and marks text.
What its own autograder would do wrong here is switched off or set right below.
"""

import os
import sys

c = get_config()  # noqa: F821

# nbgrader calls `alembic` by its bare name, also where Jupyter was started without activating its environment.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])

c.CourseDirectory.course_id = "labkit"
c.CourseDirectory.db_url = "sqlite:///gradebook.db"

# A learner's prose cannot run a script in the reader's browser, even if some got past labkit, which shows it as text.
c.HTMLExporter.sanitize_html = True

# `nbgrader autograde` runs what it is given without a sandbox, takes `nan` or a word for full marks, keeps the old
# score when a notebook fails, and leaves a deleted cell waiting for ever. It is not needed here, and finds nothing to
# do; should it ever get a notebook, it neither runs it nor touches a score.
c.Execute.enabled = False
c.SaveAutoGrades.enabled = False

# The stubs that lessons have where a solution stood.
c.ClearSolutions.code_stub = {"python": "..."}
c.ClearSolutions.text_stub = "..."
