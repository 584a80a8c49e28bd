"""Grading a folder of submissions: for instructors only, nothing that learners run imports it (extra ``grading``)."""
