package soliton_test

import (
	"flag"
	"fmt"
	"go/ast"
	"go/types"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
)

// promised are the packages for users. Their exported identifiers are in testdata/api.txt, and docs/api.md says what is promised.
var promised = []string{"comm", "data", "data/bucket", "data/parquet", "dvfs", "elastic", "kernel", "nn", "rng", "trainer", "trainer/trainertest", "zero"}

const apiFile = "testdata/api.txt"

var update = flag.Bool("update", false, "write "+apiFile)

// A change of the public packages shows in a file, so that none happens unseen.
func TestAPI(t *testing.T) {
	got := strings.Join(api(source(t), promised), "\n") + "\n"
	if *update {
		if err := os.WriteFile(apiFile, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(apiFile)
	if err != nil {
		t.Fatal(err)
	}
	was, is := strings.Split(string(want), "\n"), strings.Split(got, "\n")
	report(t, without(is, was, "%s is new: go test -run TestAPI -update . adds it"))
	report(t, without(was, is, "%s is gone: users may need it"))
}

// Programs and packages below internal are not for users; every other package is promised.
func TestAPIIsWhole(t *testing.T) {
	for _, f := range source(t) {
		if dir := f.dir(); !f.test && f.pkg != "main" && !strings.Contains("/"+dir+"/", "/internal/") && !slices.Contains(promised, dir) {
			t.Errorf("%s: %s can be imported by users: promise it, or move it below internal", f.name, dir)
		}
	}
}

func TestAPILists(t *testing.T) {
	files, err := parse(fstest.MapFS{
		"p/p.go": {Data: []byte("package p\n\nimport \"" + module + "/internal/q\"\n\n" +
			"type T = q.T\n\ntype I interface{ F(a, b int) error }\n\nconst A, b = 1, 2\n\nfunc (I) hidden() {}\n\nfunc G(xs ...T) {}\n")},
		"internal/q/q.go": {Data: []byte("package q\n\nimport \"" + module + "/internal/r\"\n\ntype T = r.U\n")},
		"internal/r/r.go": {Data: []byte("package r\n\ntype U struct {\n\tX, y int\n}\n\nfunc (u *U) M() {}\n")},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"pkg p, const A", "pkg p, func G(...T)", "pkg p, method (*T) M()", "pkg p, type I interface", "pkg p, type I, F(int, int) error",
		"pkg p, type T = q.T", "pkg p, type T, X int",
	}
	if got := api(files, []string{"p"}); !slices.Equal(got, want) {
		t.Errorf("listed %q, want %q", got, want)
	}
}

func without(a, b []string, format string) (faults []string) {
	for _, x := range a {
		if !slices.Contains(b, x) {
			faults = append(faults, fmt.Sprintf(format, x))
		}
	}
	return faults
}

// api lists the exported identifiers of packages, one a line, as the files in the folder api of Go do. A type that stands for one
// of an internal package is listed with that one's fields and methods.
func api(files []file, dirs []string) (lines []string) {
	for _, dir := range dirs {
		p := apiPackage{files: files, add: func(format string, args ...any) {
			lines = append(lines, "pkg "+dir+", "+fmt.Sprintf(format, args...))
		}}
		p.list(dir)
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}

type apiPackage struct {
	files []file
	add   func(format string, args ...any)
}

// decls calls f with the declarations of a package.
func (p apiPackage) decls(dir string, f func(in *ast.File, d ast.Decl)) {
	for _, x := range p.files {
		if x.dir() == dir && !x.test {
			for _, d := range x.ast.Decls {
				f(x.ast, d)
			}
		}
	}
}

func (p apiPackage) list(dir string) {
	p.decls(dir, func(in *ast.File, d ast.Decl) {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Name.IsExported() && d.Recv == nil {
				p.add("func %s%s", d.Name, signature(d.Type))
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.ValueSpec:
					for _, n := range s.Names {
						if n.IsExported() {
							p.add("%s %s", d.Tok, n)
						}
					}
				case *ast.TypeSpec:
					if s.Name.IsExported() {
						p.typ(dir, in, s)
					}
				}
			}
		}
	})
}

func (p apiPackage) typ(dir string, in *ast.File, s *ast.TypeSpec) {
	name := s.Name.Name
	if s.Assign.IsValid() {
		p.add("type %s = %s", name, types.ExprString(s.Type))
		p.alias(name, dir, in, s)
		return
	}
	kind := types.ExprString(s.Type)
	switch s.Type.(type) {
	case *ast.StructType:
		kind = "struct"
	case *ast.InterfaceType:
		kind = "interface"
	}
	p.add("type %s %s", name, kind)
	p.members(name, s.Type)
	p.methods(dir, name, name)
}

// alias lists the members of the type that an alias stands for, which may be an alias, too, under the name that users see.
func (p apiPackage) alias(name, dir string, in *ast.File, s *ast.TypeSpec) {
	x, ok := s.Type.(*ast.SelectorExpr)
	if !s.Assign.IsValid() || !ok {
		p.members(name, s.Type)
		p.methods(dir, s.Name.Name, name)
		return
	}
	for _, spec := range in.Imports {
		full, _ := strconv.Unquote(spec.Path.Value)
		if path.Base(full) != x.X.(*ast.Ident).Name {
			continue
		}
		dir = strings.TrimPrefix(full, module+"/")
		p.decls(dir, func(in *ast.File, d ast.Decl) {
			if g, ok := d.(*ast.GenDecl); ok {
				for _, spec := range g.Specs {
					if o, ok := spec.(*ast.TypeSpec); ok && o.Name.Name == x.Sel.Name {
						p.alias(name, dir, in, o)
					}
				}
			}
		})
	}
}

// members lists the fields of a struct and the methods of an interface.
func (p apiPackage) members(name string, t ast.Expr) {
	fields := &ast.FieldList{}
	switch t := t.(type) {
	case *ast.StructType:
		fields = t.Fields
	case *ast.InterfaceType:
		fields = t.Methods
	}
	for _, f := range fields.List {
		if len(f.Names) == 0 {
			p.add("type %s, embedded %s", name, types.ExprString(f.Type))
		}
		for _, n := range f.Names {
			switch ft, method := f.Type.(*ast.FuncType); {
			case !n.IsExported():
			case method && t != nil && isInterface(t):
				p.add("type %s, %s%s", name, n, signature(ft))
			default:
				p.add("type %s, %s %s", name, n, types.ExprString(f.Type))
			}
		}
	}
}

func isInterface(t ast.Expr) bool {
	_, ok := t.(*ast.InterfaceType)
	return ok
}

// methods lists the methods of the type own of a package, under the name that users see.
func (p apiPackage) methods(dir, own, name string) {
	p.decls(dir, func(_ *ast.File, d ast.Decl) {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Recv == nil || !f.Name.IsExported() {
			return
		}
		if recv := types.ExprString(f.Recv.List[0].Type); strings.TrimPrefix(recv, "*") == own {
			p.add("method (%s) %s%s", strings.Replace(recv, own, name, 1), f.Name, signature(f.Type))
		}
	})
}

// signature renders a function's type without the names of its parameters.
func signature(f *ast.FuncType) string {
	bare := func(l *ast.FieldList) *ast.FieldList {
		if l == nil {
			return nil
		}
		out := &ast.FieldList{}
		for _, field := range l.List {
			for range max(len(field.Names), 1) {
				out.List = append(out.List, &ast.Field{Type: field.Type})
			}
		}
		return out
	}
	return strings.TrimPrefix(types.ExprString(&ast.FuncType{Params: bare(f.Params), Results: bare(f.Results)}), "func")
}
