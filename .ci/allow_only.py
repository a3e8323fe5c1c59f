"""An import contract for import-linter: modules may import, of our own packages, a short list and no more.

import-linter's own `forbidden` contract names what is not allowed, so a new module is allowed until someone
thinks of it. This one names what is allowed, so a new module needs no edit here to be covered.

Looks at direct imports only, and at our own packages only; what may come in indirectly or from outside
is said by `forbidden` contracts in pyproject.toml.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class AllowOnly(Contract):
    """`source_modules` without `exempt_modules` import nothing of ours outside `allowed_modules`.

    Each name stands for the module and all below it.
    """

    type_name = "allow_only"

    source_modules = fields.ListField(subfield=fields.StringField())
    allowed_modules = fields.ListField(subfield=fields.StringField())
    exempt_modules = fields.ListField(subfield=fields.StringField(), required=False, default=[])

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        broken = [f"{source} does not exist" for source in self.source_modules if source not in graph.modules]
        for importer in sorted(graph.modules):
            if not _under(importer, self.source_modules) or _under(importer, self.exempt_modules):
                continue
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                if graph.is_module_squashed(imported) or _under(imported, self.allowed_modules):
                    continue
                for detail in graph.get_import_details(importer=importer, imported=imported):
                    broken.append(f"{importer} imports {imported} (line {detail['line_number']})")
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        output.print_error(f"Allowed: {', '.join(self.allowed_modules)}", bold=False)
        for line in check.metadata["broken"]:
            output.print_error(f"- {line}", bold=False)


def _under(module: str, roots: list[str]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)
