package soliton_test

import (
	"fmt"
	"go/ast"
	"go/types"
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestWireDocument holds docs/wire.md against the code: every message with its kind and its fields, every constructor of a key
// or a call, every kind of log entry and every type of frame has a row.
func TestWireDocument(t *testing.T) {
	text, err := os.ReadFile("docs/wire.md")
	if err != nil {
		t.Fatal(err)
	}
	report(t, checkWire(source(t), string(text)))
}

func checkWire(files []file, document string) (faults []string) {
	rows := map[string]string{} // of tables, by the code in their first cell
	for row := range strings.Lines(document) {
		if name, rest, ok := strings.Cut(strings.TrimPrefix(row, "| `"), "` |"); ok && strings.HasPrefix(row, "| `") {
			rows[name] = rest
		}
	}
	want := func(f file, n ast.Node, what string, cells ...string) {
		row, ok := rows[what]
		if !ok {
			faults = append(faults, fmt.Sprintf("%s: docs/wire.md has no row for %s", f.at(n.Pos()), what))
		}
		for _, c := range cells {
			if ok && !regexp.MustCompile(`\b`+regexp.QuoteMeta(c)+`\b`).MatchString(row) {
				faults = append(faults, fmt.Sprintf("%s: the row of %s in docs/wire.md does not name %s", f.at(n.Pos()), what, c))
			}
		}
	}
	fields := map[string][]string{}
	registered := map[string]bool{}
	for _, f := range files {
		if f.dir() != "internal/net/control" || f.test {
			continue
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.TypeSpec:
				if s, ok := n.Type.(*ast.StructType); ok {
					for _, l := range s.Fields.List {
						for _, name := range l.Names {
							if name.IsExported() {
								fields[n.Name.Name] = append(fields[n.Name.Name], name.Name)
							}
						}
					}
				}
			case *ast.CompositeLit:
				if a, ok := n.Type.(*ast.ArrayType); ok && types.ExprString(a.Elt) == "Message" {
					for _, m := range n.Elts {
						registered[types.ExprString(m.(*ast.CompositeLit).Type)] = true
					}
				}
			}
			return true
		})
	}
	for _, f := range files {
		if f.test {
			continue
		}
		for _, d := range f.ast.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				switch {
				case f.dir() == "internal/net/control" && d.Recv != nil && d.Name.Name == "kind":
					name := d.Recv.List[0].Type.(*ast.Ident).Name
					kind := d.Body.List[0].(*ast.ReturnStmt).Results[0].(*ast.BasicLit).Value
					want(f, d, name, append(fields[name], strings.Trim(kind, `"`))...)
					if !registered[name] {
						faults = append(faults, fmt.Sprintf("%s: %s is not registered in codec.go", f.at(d.Pos()), name))
					}
				case f.dir() == "internal/worker/key" && d.Recv == nil && d.Name.IsExported() && d.Type.Results != nil:
					if s, ok := d.Type.Results.List[0].Type.(*ast.SelectorExpr); ok && (s.Sel.Name == "Key" || s.Sel.Name == "Call") {
						want(f, d, d.Name.Name)
					}
				}
			case *ast.GenDecl:
				for _, s := range d.Specs {
					v, ok := s.(*ast.ValueSpec)
					if !ok {
						continue
					}
					for _, name := range v.Names {
						switch {
						case f.name == "internal/host/agree/entry.go" && strings.HasPrefix(name.Name, "kind"):
							want(f, name, strings.TrimPrefix(name.Name, "kind"))
						case strings.HasPrefix(name.Name, "Frame") && strings.HasPrefix(f.dir(), "internal/net/"):
							want(f, name, name.Name)
						}
					}
				}
			}
		}
	}
	return faults
}
