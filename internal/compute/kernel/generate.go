package kernel

//go:generate sh -c "cd asm && go run . -path avx512 -out ../avx512_amd64.s -stubs ../avx512_amd64.go -pkg kernel"
//go:generate sh -c "cd asm && go run . -path avx2 -out ../avx2_amd64.s -stubs ../avx2_amd64.go -pkg kernel"
