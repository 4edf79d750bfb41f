"""The members of a job: the records nodes publish, and the view that decisions start from."""
