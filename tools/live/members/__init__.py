"""A job as its coordinator holds it: members, ranks, plans; read only, beside the events or alone.

`RollCall` makes a `Roll` of the coordinator's records, and `overlay` puts it over the view that the
events gave; both are pure. `MembersReader` finds a job at a coordinator and follows its records.
"""
